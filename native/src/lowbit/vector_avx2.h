// Operations on vectors of 256 bits (AVX2), named alike for all widths, for the schemes
// written once for both.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace slipstream {
namespace lowbit {
namespace {

struct Vector {
  using Type = __m256i;
  static constexpr int64_t kBytes = 32;
  // From this width on unpacked weights are made signed, so that more products fit 16 bits.
  static constexpr int kSignedFrom = 5;
  static constexpr bool kDots = false;  // whether there is `dot`

  static Type zero() { return _mm256_setzero_si256(); }
  static Type load(const void* from) { return _mm256_load_si256(static_cast<const Type*>(from)); }
  static Type load_anywhere(const void* from) {
    return _mm256_loadu_si256(static_cast<const Type*>(from));
  }
  static void store(void* to, Type x) { _mm256_store_si256(static_cast<Type*>(to), x); }
  static void store_anywhere(void* to, Type x) { _mm256_storeu_si256(static_cast<Type*>(to), x); }
  static Type bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
  static Type words(int value) { return _mm256_set1_epi16(static_cast<short>(value)); }
  static Type broadcast4(const uint8_t* from) {
    int32_t value;
    __builtin_memcpy(&value, from, 4);
    return _mm256_set1_epi32(value);
  }
  // The same 16 bytes in each 128-bit lane.
  static Type broadcast16(const uint8_t* from) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(from)));
  }

  static Type both(Type x, Type y) { return _mm256_and_si256(x, y); }
  static Type or_both(Type so_far, Type x, Type y) {
    return _mm256_or_si256(so_far, _mm256_and_si256(x, y));
  }
  static Type shift_right16(Type x, int by) { return _mm256_srli_epi16(x, by); }
  static Type shift_left16(Type x, int by) { return _mm256_slli_epi16(x, by); }
  static Type shift_left32(Type x, int by) { return _mm256_slli_epi32(x, by); }
  static Type add8(Type x, Type y) { return _mm256_add_epi8(x, y); }
  static Type add16(Type x, Type y) { return _mm256_add_epi16(x, y); }
  static Type add32(Type x, Type y) { return _mm256_add_epi32(x, y); }
  static Type subtract16(Type x, Type y) { return _mm256_sub_epi16(x, y); }
  static Type subtract8(Type x, Type y) { return _mm256_sub_epi8(x, y); }
  static Type multiply_add8(Type a, Type w) { return _mm256_maddubs_epi16(a, w); }
  static Type multiply_add16(Type x, Type y) { return _mm256_madd_epi16(x, y); }
  static Type shuffle(Type table, Type index) { return _mm256_shuffle_epi8(table, index); }
  static Type interleave_low16(Type x, Type y) { return _mm256_unpacklo_epi16(x, y); }
  static Type interleave_high16(Type x, Type y) { return _mm256_unpackhi_epi16(x, y); }

  // A full adder on every bit: sum + x + y = 2 * returned + sum afterwards.
  static Type carry(Type& sum, Type x, Type y) {
    const Type half = _mm256_xor_si256(sum, x);
    const Type out = _mm256_or_si256(_mm256_and_si256(sum, x), _mm256_and_si256(half, y));
    sum = _mm256_xor_si256(half, y);
    return out;
  }
};

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
