// The dot product of AVX-VNNI by instructions of AVX2, for processors that lack it.
//
// Included before everything else (g++ -include). Products are made of bytes widened to 16 bits and
// added in 32: exact, where vpmaddubsw would saturate.

#pragma once

#include <immintrin.h>

#include <type_traits>

namespace emulated {

#ifndef __AVXVNNI__
inline __m256i dot(__m256i sums, __m256i unsigned_bytes, __m256i signed_bytes) {
  const auto pairs = [&](auto half) {
    constexpr int kHalf = decltype(half)::value;
    return _mm256_madd_epi16(
        _mm256_cvtepu8_epi16(_mm256_extracti128_si256(unsigned_bytes, kHalf)),
        _mm256_cvtepi8_epi16(_mm256_extracti128_si256(signed_bytes, kHalf)));
  };
  // Of each half: pairs 0 1 2 3 and 4 5 6 7; hadd leaves quads of the halves in turns.
  const __m256i turns = _mm256_hadd_epi32(pairs(std::integral_constant<int, 0>{}),
                                          pairs(std::integral_constant<int, 1>{}));
  return _mm256_add_epi32(sums, _mm256_permute4x64_epi64(turns, 0xd8));
}
#define _mm256_dpbusd_avx_epi32 emulated::dot
#endif

}  // namespace emulated
