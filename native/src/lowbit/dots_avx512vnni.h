// Vectors of 512 bits with the dot product of AVX-512 VNNI, for the schemes of dot_tiles.h.
#pragma once

#include "lowbit/vector_avx512bw.h"

namespace slipstream {
namespace lowbit {
namespace {

struct DotVector : Vector {
  // 24 sums of 32 registers.
  static constexpr int64_t kTileRows = 12, kVectors = 2;
  static constexpr int kSignedFrom = 8;  // up to 7 bits are a signed byte as they are
  static constexpr bool kDots = true;

  static Type dot(Type sum, Type a, Type w) { return _mm512_dpbusd_epi32(sum, a, w); }
};

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
