// Operations on vectors of 512 bits (AVX-512 BW), named alike for all widths, for the schemes
// written once for both.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace slipstream {
namespace lowbit {
namespace {

struct Vector {
  using Type = __m512i;
  static constexpr int64_t kBytes = 64;
  // From this width on unpacked weights are made signed, so that more products fit 16 bits.
  static constexpr int kSignedFrom = 5;
  static constexpr bool kDots = false;  // whether there is `dot`

  static Type zero() { return _mm512_setzero_si512(); }
  static Type load(const void* from) { return _mm512_load_si512(static_cast<const Type*>(from)); }
  static Type load_anywhere(const void* from) { return _mm512_loadu_si512(from); }
  static void store(void* to, Type x) { _mm512_store_si512(static_cast<Type*>(to), x); }
  static void store_anywhere(void* to, Type x) { _mm512_storeu_si512(static_cast<Type*>(to), x); }
  static Type bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
  static Type words(int value) { return _mm512_set1_epi16(static_cast<short>(value)); }
  static Type broadcast4(const uint8_t* from) {
    int32_t value;
    __builtin_memcpy(&value, from, 4);
    return _mm512_set1_epi32(value);
  }
  // The same 16 bytes in each 128-bit lane.
  static Type broadcast16(const uint8_t* from) {
    return _mm512_maskz_broadcast_i32x4(
        0xffff, _mm_load_si128(reinterpret_cast<const __m128i*>(from)));
  }

  static Type both(Type x, Type y) { return _mm512_and_si512(x, y); }
  static Type or_both(Type so_far, Type x, Type y) {
    return _mm512_ternarylogic_epi32(so_far, x, y, 0xf8);
  }
  static Type shift_right16(Type x, int by) { return _mm512_srli_epi16(x, static_cast<unsigned>(by)); }
  static Type shift_left16(Type x, int by) { return _mm512_slli_epi16(x, static_cast<unsigned>(by)); }
  static Type shift_left32(Type x, int by) { return _mm512_slli_epi32(x, static_cast<unsigned>(by)); }
  static Type add8(Type x, Type y) { return _mm512_add_epi8(x, y); }
  static Type add16(Type x, Type y) { return _mm512_add_epi16(x, y); }
  static Type add32(Type x, Type y) { return _mm512_add_epi32(x, y); }
  static Type subtract16(Type x, Type y) { return _mm512_sub_epi16(x, y); }
  static Type subtract8(Type x, Type y) { return _mm512_sub_epi8(x, y); }
  static Type multiply_add8(Type a, Type w) { return _mm512_maddubs_epi16(a, w); }
  static Type multiply_add16(Type x, Type y) { return _mm512_madd_epi16(x, y); }
  static Type shuffle(Type table, Type index) { return _mm512_shuffle_epi8(table, index); }
  static Type interleave_low16(Type x, Type y) { return _mm512_unpacklo_epi16(x, y); }
  static Type interleave_high16(Type x, Type y) { return _mm512_unpackhi_epi16(x, y); }

  // A full adder on every bit: sum + x + y = 2 * returned + sum afterwards.
  static Type carry(Type& sum, Type x, Type y) {
    const Type out = _mm512_ternarylogic_epi32(sum, x, y, 0xe8);
    sum = _mm512_ternarylogic_epi32(sum, x, y, 0x96);
    return out;
  }
};

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
