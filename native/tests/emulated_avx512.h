// The intrinsics of the AVX-512 kernels in plain C++, for processors that lack the instructions.
//
// Included before everything else (g++ -include). What the compiler may not emit is replaced: with
// -march=native on a processor of the level nothing is, on one with AVX-512 BW the four newest, and
// without any such option all of them.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace emulated {

template <typename Lane>
struct Lanes {
  static constexpr int kCount = 64 / sizeof(Lane);
  Lane lane[kCount];

  Lanes() : lane{} {}
  explicit Lanes(__m512i vector) { std::memcpy(lane, &vector, sizeof lane); }
  operator __m512i() const {
    __m512i vector;
    std::memcpy(&vector, lane, sizeof lane);
    return vector;
  }
};

template <typename Lane, typename F>
__m512i each(const F& f) {
  Lanes<Lane> result;
  for (int i = 0; i < result.kCount; ++i) result.lane[i] = f(i);
  return result;
}

#ifndef __AVX512VNNI__
inline __m512i dot(__m512i sums, __m512i unsigned_bytes, __m512i signed_bytes) {
  const Lanes<int32_t> sum(sums);
  const Lanes<uint8_t> a(unsigned_bytes);
  const Lanes<int8_t> b(signed_bytes);
  return each<int32_t>([&](int i) {
    int32_t dot = 0;
    for (int t = 0; t < 4; ++t) dot += a.lane[4 * i + t] * b.lane[4 * i + t];
    return static_cast<int32_t>(static_cast<uint32_t>(sum.lane[i]) + static_cast<uint32_t>(dot));
  });
}
#define _mm512_dpbusd_epi32 emulated::dot
#endif

#ifndef __AVX512VBMI__
inline __m512i permute(__m512i indices, __m512i bytes) {
  const Lanes<uint8_t> index(indices), from(bytes);
  return each<uint8_t>([&](int i) { return from.lane[index.lane[i] & 63]; });
}
#define _mm512_permutexvar_epi8 emulated::permute

inline __m512i multishift(__m512i shifts, __m512i words) {
  const Lanes<uint8_t> shift(shifts);
  const Lanes<uint64_t> word(words);
  return each<uint8_t>([&](int i) {
    const uint64_t from = word.lane[i / 8];
    const int by = shift.lane[i] & 63;
    const uint64_t rotated = by == 0 ? from : from >> by | from << (64 - by);
    return static_cast<uint8_t>(rotated);
  });
}
#define _mm512_multishift_epi64_epi8 emulated::multishift
#endif

#ifndef __AVX512VPOPCNTDQ__
inline __m512i count_bits(__m512i words) {
  const Lanes<uint64_t> word(words);
  return each<uint64_t>([&](int i) { return __builtin_popcountll(word.lane[i]); });
}
#define _mm512_popcnt_epi64 emulated::count_bits
#endif

#ifndef __AVX512BW__
template <typename Lane>
__m512i load(uint64_t mask, const void* memory) {
  Lanes<Lane> result;
  for (int i = 0; i < result.kCount; ++i)
    if (mask >> i & 1)
      std::memcpy(&result.lane[i], static_cast<const Lane*>(memory) + i, sizeof(Lane));
  return result;
}
template <typename Lane>
void store(void* memory, uint64_t mask, __m512i vector) {
  const Lanes<Lane> from(vector);
  for (int i = 0; i < from.kCount; ++i)
    if (mask >> i & 1)
      std::memcpy(static_cast<Lane*>(memory) + i, &from.lane[i], sizeof(Lane));
}
inline uint64_t test_bytes(__m512i a, __m512i b) {
  const Lanes<uint8_t> x(a), y(b);
  uint64_t mask = 0;
  for (int i = 0; i < 64; ++i) mask |= static_cast<uint64_t>((x.lane[i] & y.lane[i]) != 0) << i;
  return mask;
}
template <typename Lane>
__m512i add(__m512i a, __m512i b) {
  const Lanes<Lane> x(a), y(b);
  return each<Lane>([&](int i) { return x.lane[i] + y.lane[i]; });
}
inline __m512i shift_left(__m512i words, unsigned by) {
  const Lanes<uint64_t> word(words);
  return each<uint64_t>([&](int i) { return word.lane[i] << by; });
}
// Of each quarter of 16 bytes the lower or upper half of a and b, lane by lane.
template <typename Lane, bool kUpper>
__m512i unpack(__m512i a, __m512i b) {
  const Lanes<Lane> from[2] = {Lanes<Lane>(a), Lanes<Lane>(b)};
  constexpr int kQuarter = 16 / sizeof(Lane);
  return each<Lane>([&](int i) {
    const int at = i % kQuarter / 2 + (kUpper ? kQuarter / 2 : 0);
    return from[i % 2].lane[i / kQuarter * kQuarter + at];
  });
}
inline __m512i shuffle_quarters(__m512i a, __m512i b, int which) {
  const Lanes<uint64_t> from[2] = {Lanes<uint64_t>(a), Lanes<uint64_t>(b)};
  return each<uint64_t>(
      [&](int i) { return from[i / 4].lane[(which >> i / 2 * 2 & 3) * 2 + i % 2]; });
}
inline __m512i pick(__m512i a, __m512i indices, __m512i b) {
  const Lanes<uint32_t> from[2] = {Lanes<uint32_t>(a), Lanes<uint32_t>(b)}, index(indices);
  return each<uint32_t>([&](int i) { return from[index.lane[i] >> 4 & 1].lane[index.lane[i] & 15]; });
}
template <typename... Lane>
__m512i listed(Lane... lanes) {
  const int32_t values[] = {lanes...};
  return each<int32_t>([&](int i) { return values[i]; });
}
#define _mm512_permutex2var_epi32 emulated::pick
#define _mm512_setr_epi32 emulated::listed
#define _mm512_unpacklo_epi32 emulated::unpack<uint32_t, false>
#define _mm512_unpackhi_epi32 emulated::unpack<uint32_t, true>
#define _mm512_unpacklo_epi64 emulated::unpack<uint64_t, false>
#define _mm512_unpackhi_epi64 emulated::unpack<uint64_t, true>
#define _mm512_shuffle_i32x4 emulated::shuffle_quarters
#define _mm512_setzero_si512() (__m512i{})
#define _mm512_set1_epi8(x) emulated::each<int8_t>([value = (x)](int) { return value; })
#define _mm512_set1_epi32(x) emulated::each<int32_t>([value = (x)](int) { return value; })
#define _mm512_set1_epi64(x) emulated::each<int64_t>([value = (x)](int) { return value; })
#define _mm512_loadu_si512(from) emulated::load<uint8_t>(~0ull, from)
#define _mm512_storeu_si512(to, x) emulated::store<uint8_t>(to, ~0ull, x)
#define _mm512_maskz_loadu_epi8(mask, from) emulated::load<uint8_t>(mask, from)
#define _mm512_maskz_loadu_epi32(mask, from) emulated::load<int32_t>(mask, from)
#define _mm512_mask_storeu_epi32(to, mask, x) emulated::store<int32_t>(to, mask, x)
#define _mm512_and_si512(a, b) ((a) & (b))
#define _mm512_sub_epi8(a, b) emulated::each<uint8_t>([x = emulated::Lanes<uint8_t>(a), \
                                                       y = emulated::Lanes<uint8_t>(b)](int i) { \
  return static_cast<uint8_t>(x.lane[i] - y.lane[i]); \
})
#define _mm512_add_epi32 emulated::add<uint32_t>
#define _mm512_add_epi64 emulated::add<uint64_t>
#define _mm512_slli_epi64 emulated::shift_left
#define _mm512_test_epi8_mask emulated::test_bytes
#endif

}  // namespace emulated
