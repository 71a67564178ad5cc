// Vectors of 256 bits with the dot product of AVX-VNNI, for the schemes of dot_tiles.h.
#pragma once

#include "lowbit/vector_avx2.h"

namespace slipstream {
namespace lowbit {
namespace {

struct DotVector : Vector {
  // 12 sums of 16 registers.
  static constexpr int64_t kTileRows = 6, kVectors = 2;
  static constexpr int kSignedFrom = 8;  // up to 7 bits are a signed byte as they are
  static constexpr bool kDots = true;

  static Type dot(Type sum, Type a, Type w) { return _mm256_dpbusd_avx_epi32(sum, a, w); }
};

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
