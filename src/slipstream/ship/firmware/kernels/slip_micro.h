/* Integer kernels for networks of int8, in C99, without a heap, without a C library but memcpy and
 * memset. Every one gives the bytes that TensorFlow Lite Micro's reference kernels give.
 *
 * Arithmetic (Jacob et al., arXiv 1712.05877): activations have a scale and a zero point, weights a
 * scale for each output channel. A sum of products is brought to the output's scale by a 32-bit
 * multiplier and a shift, rounded twice: first to 32 bits (half up), then by the shift (half away
 * from zero).
 */
#ifndef SLIP_MICRO_H
#define SLIP_MICRO_H

#include <stdint.h>
#include <string.h>

#if defined(__ARM_FEATURE_MVE)
#define SLIP_HELIUM 1
#include <arm_mve.h>
#endif
#if defined(__ARM_FEATURE_DSP) && __ARM_FEATURE_DSP
#define SLIP_DSP 1
#include <arm_acle.h>
#endif

/* What is known of a convolution before it runs. The input's zero point is folded into the bias, so
 * that the padding is the zero point itself. `slip_conv_2d` has weights packed, four channels and two
 * depths at a time (see `pack_pairs` in convolutions.py); `slip_conv_plain` has them as the model has
 * them, a row of `depth` for each channel. Both sizes are padded to four with zeros. */
typedef struct {
  const int8_t *weights;
  const int32_t *bias;     /* one an output channel, padded to four */
  const int32_t *rescale;  /* pairs: a multiplier, and its shift to the right: see `slip_to_int8` */
  uint16_t in_h, in_w, in_c, out_h, out_w, out_c;
  uint16_t depth;          /* kernel_h * kernel_w * in_c, padded to four */
  uint8_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, pad_top, pad_left;
  int8_t in_zero, out_zero, low, high;
  uint8_t narrow;          /* all channels may be rescaled in the short form */
} slip_conv;

/* Bytes that `slip_conv_plain` has two columns of so many depths in. */
#if defined(SLIP_HELIUM)
#define SLIP_PLAIN_COLUMNS(depth) (((depth) + 15) / 16 * 32)
#elif defined(SLIP_DSP)
#define SLIP_PLAIN_COLUMNS(depth) (4 * (depth))
#else
#define SLIP_PLAIN_COLUMNS(depth) (2 * (depth))
#endif

/* A depthwise convolution: weights are the model's, [kernel_h][kernel_w][output channel]. */
typedef struct {
  const int8_t *weights;
  const int32_t *bias;
  const int32_t *rescale;
  uint16_t in_h, in_w, channels, out_h, out_w, multiplier;
  uint8_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, pad_top, pad_left;
  int8_t in_zero, out_zero, low, high;
  uint8_t narrow;
} slip_depthwise;

typedef struct {
  uint16_t in_h, in_w, channels, out_h, out_w;
  uint8_t kernel_h, kernel_w, stride_h, stride_w, pad_top, pad_left;
  int8_t low, high;
} slip_pool;

typedef struct {
  int32_t count;
  int32_t zero_a, zero_b, multiplier_a, shift_a, multiplier_b, shift_b, multiplier, shift;
  int32_t out_zero, low, high;
} slip_add;

typedef struct {
  int32_t rows, columns, multiplier, left_shift, least_difference;
} slip_softmax;

typedef struct {
  const int8_t *table;     /* 256 codes, by the code read as an unsigned byte */
  int32_t count;
} slip_lookup;

typedef struct {
  int32_t count, period;   /* numbers of the first tensor, and of the second, which is repeated */
  int32_t zero_a, zero_b, multiplier, shift, out_zero, low, high;
} slip_mul;

typedef struct {
  int32_t rows, first, second; /* bytes a row of each */
} slip_concat;

typedef struct {
  int32_t pixels, channels, in_zero, multiplier, shift, out_zero;
} slip_mean;

/* A transposed convolution: weights are the model's, [output channel][kernel_h][kernel_w][in_c]. */
typedef struct {
  const int8_t *weights;
  const int32_t *bias;     /* one an output channel, without the input's zero point */
  const int32_t *rescale;  /* pairs: see `slip_to_int8`, the long form */
  uint16_t in_h, in_w, in_c, out_h, out_w, out_c;
  uint8_t kernel_h, kernel_w, stride_h, stride_w, pad_top, pad_left;
  int8_t in_zero, out_zero, low, high;
} slip_transpose;

typedef struct {
  int32_t in_h, in_w, channels, factor_h, factor_w;
} slip_repeat;

/* What the kernel covers at an output pixel, `depth` int8 written to `column`, which is returned. */
const int8_t *slip_gather(const slip_conv *op, const int8_t *in, int y, int x, int8_t *column);
void slip_conv_2d(const slip_conv *op, const int8_t *in, int8_t *out, void *scratch);
void slip_depthwise_2d(const slip_depthwise *op, const int8_t *in, int8_t *out, void *scratch);
void slip_conv_plain(const slip_conv *op, const int8_t *in, int8_t *out, void *scratch);
void slip_depthwise_any(const slip_depthwise *op, const int8_t *in, int8_t *out, void *scratch);
void slip_average_pool(const slip_pool *op, const int8_t *in, int8_t *out);
void slip_max_pool(const slip_pool *op, const int8_t *in, int8_t *out);
void slip_add_int8(const slip_add *op, const int8_t *a, const int8_t *b, int8_t *out);
void slip_softmax_int8(const slip_softmax *op, const int8_t *in, int8_t *out);
void slip_lookup_int8(const slip_lookup *op, const int8_t *in, int8_t *out);
void slip_mul_int8(const slip_mul *op, const int8_t *a, const int8_t *b, int8_t *out);
void slip_concat_int8(const slip_concat *op, const int8_t *a, const int8_t *b, int8_t *out);
void slip_mean_int8(const slip_mean *op, const int8_t *in, int8_t *out);
void slip_transpose_conv(const slip_transpose *op, const int8_t *in, int8_t *out);
void slip_repeat_int8(const slip_repeat *op, const int8_t *in, int8_t *out);

/* Shifts of negative numbers are arithmetic on every compiler that this is built with; shifts to
 * the left go through unsigned numbers, which is defined. */
static inline int32_t slip_shift_left(int32_t value, int bits) {
  return (int32_t)((uint32_t)value << bits);
}

/* A sum that wraps around, where numbers that somebody made up could be too large. */
static inline int32_t slip_sum(int32_t a, int32_t b) {
  return (int32_t)((uint32_t)a + (uint32_t)b);
}

/* Round(a * b / 2^31), half up, saturated: the high half of the doubled product. */
static inline int32_t slip_high_product(int32_t a, int32_t b) {
  if (a == b && a == INT32_MIN) return INT32_MAX;
  return (int32_t)(((int64_t)a * b + (1 << 30)) >> 31);
}

/* Round(value / 2^bits), half away from zero. */
static inline int32_t slip_round_shift(int32_t value, int bits) {
  int32_t mask = (int32_t)((1u << bits) - 1);
  int32_t rest = value & mask;
  return (value >> bits) + (rest > (mask >> 1) + (value < 0));
}

/* value * multiplier * 2^shift / 2^31, rounded twice; shift may have either sign. */
static inline int32_t slip_rescale(int32_t value, int32_t multiplier, int shift) {
  int left = shift > 0 ? shift : 0;
  return slip_round_shift(slip_high_product(slip_shift_left(value, left), multiplier), left - shift);
}

static inline int32_t slip_clamp(int32_t value, int32_t low, int32_t high) {
  return value < low ? low : value > high ? high : value;
}

/* (a * b + 2^31) / 2^32, and the same plus c: one instruction each where there are DSP ones. */
static inline int32_t slip_smmulr(int32_t a, int32_t b) {
#ifdef SLIP_DSP
  int32_t result;
  __asm__("smmulr %0, %1, %2" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return (int32_t)(((int64_t)a * b + (1LL << 31)) >> 32);
#endif
}

static inline int32_t slip_smmlar(int32_t a, int32_t b, int32_t c) {
#ifdef SLIP_DSP
  int32_t result;
  __asm__("smmlar %0, %1, %2, %3" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  return (int32_t)(((int64_t)a * b + (1LL << 31)) >> 32) + c;
#endif
}

/* The short form of rescaling, where sums stay below 2^30, the shift is 2 to 31, and nothing is
 * clamped but to int8: then it is equal to `slip_rescale`. Doubling first makes one rounding high
 * product of the first rounding; adding the sign makes half up half away from zero, and `power`,
 * 2^(32 - shift), makes another high product of the second. */
static inline int32_t slip_narrow(int32_t sum, int32_t multiplier, int32_t power, int32_t zero) {
  int32_t high = slip_smmulr(slip_shift_left(sum, 1), multiplier);
  int32_t value = slip_smmlar(high + (high >> 31), power, zero);
#ifdef SLIP_DSP
  return __ssat(value, 8);
#else
  return slip_clamp(value, -128, 127);
#endif
}

/* A sum as int8 by a pair of `rescale`: a power where the short form may be used, which is
 * positive, else the shift less 64. */
static inline int32_t slip_to_int8(
    int32_t sum, const int32_t *pair, int32_t zero, int32_t low, int32_t high) {
  if (pair[1] > 0) return slip_narrow(sum, pair[0], pair[1], zero);
  int32_t value = slip_rescale(sum, pair[0], -(pair[1] + 64));
  return slip_clamp(slip_sum(value, zero), low, high);
}

#ifdef SLIP_HELIUM
/* Four sums by four pairs of `rescale`, clamped. `vqrdmulh` is the first rounding, `vrmulh` the
 * second of the short form. The long one, which is all channels' or no one's, has shifts, to the left before the first rounding, to the
 * right as the second: `vrshl` rounds half up, the sign added first makes it half away from zero. */
static inline __attribute__((always_inline)) int32x4_t slip_four(
    int32x4_t sums, int32x4_t multipliers, int32x4_t seconds, int narrow, int32_t zero, int32_t low,
    int32_t high) {
  if (narrow) {
    sums = vqrdmulhq_s32(sums, multipliers);
    sums = vaddq_s32(sums, vshrq_n_s32(sums, 31));
    sums = vrmulhq_s32(sums, seconds);
    low = -128, high = 127;
  } else {
    int32x4_t to_left = vsubq_s32(vdupq_n_s32(-64), seconds), none = vdupq_n_s32(0);
    int32x4_t to_right = vminq_s32(to_left, none);
    sums = vqrdmulhq_s32(vshlq_s32(sums, vmaxq_s32(to_left, none)), multipliers);
    sums = vaddq_s32(sums, vshrq_n_s32(vandq_s32(sums, to_right), 31));
    sums = vrshlq_s32(sums, to_right);
  }
  sums = vaddq_n_s32(sums, zero);
  return vmaxq_s32(vminq_s32(sums, vdupq_n_s32(high)), vdupq_n_s32(low));
}
#endif

/* Two 16-bit halves of a word: bytes 0 and 2, or 1 and 3, with their signs. */
static inline uint32_t slip_even_bytes(uint32_t word) {
#ifdef SLIP_DSP
  uint32_t result;
  __asm__("sxtb16 %0, %1" : "=r"(result) : "r"(word));
  return result;
#else
  return (uint16_t)(int8_t)word | (uint32_t)(uint16_t)(int8_t)(word >> 16) << 16;
#endif
}

static inline uint32_t slip_odd_bytes(uint32_t word) {
#ifdef SLIP_DSP
  uint32_t result;
  __asm__("sxtb16 %0, %1, ror #8" : "=r"(result) : "r"(word));
  return result;
#else
  return slip_even_bytes(word >> 8);
#endif
}

static inline uint32_t slip_pack(int32_t low, int32_t high) {
  return (uint32_t)(uint16_t)low | (uint32_t)high << 16;
}

/* sum + products of halves: both pairs, or one half of each word. */
#ifdef SLIP_DSP
#define slip_smlad(a, b, sum) __smlad((int16x2_t)(a), (int16x2_t)(b), (sum))
#define slip_smlatb(a, b, sum) __smlatb((int32_t)(a), (int32_t)(b), (sum))
#define slip_smlabt(a, b, sum) __smlabt((int32_t)(a), (int32_t)(b), (sum))
#define slip_smlabb(a, b, sum) __smlabb((int32_t)(a), (int32_t)(b), (sum))
#else
static inline int32_t slip_smlabb(uint32_t a, uint32_t b, int32_t sum) {
  return slip_sum(sum, (int16_t)a * (int16_t)b);
}
static inline int32_t slip_smlatb(uint32_t a, uint32_t b, int32_t sum) {
  return slip_smlabb(a >> 16, b, sum);
}
static inline int32_t slip_smlabt(uint32_t a, uint32_t b, int32_t sum) {
  return slip_smlabb(a, b >> 16, sum);
}
static inline int32_t slip_smlad(uint32_t a, uint32_t b, int32_t sum) {
  return slip_smlabb(a >> 16, b >> 16, slip_smlabb(a, b, sum));
}
#endif

static inline uint32_t slip_word(const void *address) {
  uint32_t word;
  memcpy(&word, address, 4);
  return word;
}

#endif
