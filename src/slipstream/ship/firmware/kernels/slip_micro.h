/* Kernels for int8 networks in C99, without a heap; of the C library they use memcpy and memset. Each
 * returns the same bytes as TensorFlow Lite Micro's reference kernels.
 *
 * Arithmetic (Jacob et al., arXiv 1712.05877): activations have a scale and a zero point, weights a
 * scale per output channel. A sum of products is rescaled to the output by a 32-bit multiplier and
 * a shift, rounded twice: first to 32 bits (half up), then by the shift (half away
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

/* Constants of a convolution. The input's zero point is folded into the bias, so that padding equals
 * the zero point. Weights of `slip_conv_2d` are packed, four channels and two depths at a time (see
 * `pack_pairs` in convolutions.py); those of `slip_conv_plain` are in the model's order, a row of
 * `depth` per channel. Both sizes are padded to four with zeros. */
typedef struct {
  const int8_t *weights;
  const int32_t *bias;     /* one per output channel, padded to four */
  const int32_t *rescale;  /* pairs of a multiplier and a right shift: see `slip_to_int8` */
  uint16_t in_h, in_w, in_c, out_h, out_w, out_c;
  uint16_t depth;          /* kernel_h * kernel_w * in_c, padded to four */
  uint8_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, pad_top, pad_left;
  int8_t in_zero, out_zero, low, high;
  uint8_t narrow;          /* all channels can take the short form of rescaling */
} slip_conv;

/* Bytes of two columns of `depth` in `slip_conv_plain`. */
#if defined(SLIP_HELIUM)
#define SLIP_PLAIN_COLUMNS(depth) (((depth) + 15) / 16 * 32)
#elif defined(SLIP_DSP)
#define SLIP_PLAIN_COLUMNS(depth) (4 * (depth))
#else
#define SLIP_PLAIN_COLUMNS(depth) (2 * (depth))
#endif

/* A depthwise convolution; weights in the model's order, [kernel_h][kernel_w][output channel]. */
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
  const int8_t *table;     /* 256 codes, indexed by the code as unsigned byte */
  int32_t count;
} slip_lookup;

typedef struct {
  int32_t count, period;   /* sizes of the first tensor and of the second, which is repeated */
  int32_t zero_a, zero_b, multiplier, shift, out_zero, low, high;
} slip_mul;

typedef struct {
  int32_t rows, first, second; /* bytes per row of each */
} slip_concat;

typedef struct {
  int32_t pixels, channels, in_zero, multiplier, shift, out_zero;
} slip_mean;

/* A transposed convolution; weights in the model's order, [out_c][kernel_h][kernel_w][in_c]. */
typedef struct {
  const int8_t *weights;
  const int32_t *bias;     /* one per output channel, without the input's zero point */
  const int32_t *rescale;  /* pairs: see `slip_to_int8`, the long form */
  uint16_t in_h, in_w, in_c, out_h, out_w, out_c;
  uint8_t kernel_h, kernel_w, stride_h, stride_w, pad_top, pad_left;
  int8_t in_zero, out_zero, low, high;
} slip_transpose;

typedef struct {
  int32_t in_h, in_w, channels, factor_h, factor_w;
} slip_repeat;

/* Write the `depth` int8 values under the kernel at an output pixel to `column`, and return it. */
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

/* Right shifts of negative numbers are arithmetic on all supported compilers; left shifts use
 * unsigned numbers, for which they are defined. */
static inline int32_t slip_shift_left(int32_t value, int bits) {
  return (int32_t)((uint32_t)value << bits);
}

/* A sum that wraps around, because constants of an untrusted model could be too large. */
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

/* (a * b + 2^31) / 2^32, and the same plus c: one DSP instruction each. */
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

/* The short form of rescaling equals `slip_rescale` if sums are below 2^30, the shift is 2 to 31,
 * and the only clamp is to int8. After doubling, the first rounding is a rounding high product;
 * adding the sign turns half up into half away from zero, and with `power`, 2^(32 - shift), the
 * second rounding is another high product. */
static inline int32_t slip_narrow(int32_t sum, int32_t multiplier, int32_t power, int32_t zero) {
  int32_t high = slip_smmulr(slip_shift_left(sum, 1), multiplier);
  int32_t value = slip_smmlar(high + (high >> 31), power, zero);
#ifdef SLIP_DSP
  return __ssat(value, 8);
#else
  return slip_clamp(value, -128, 127);
#endif
}

/* Rescale a sum to int8 by a pair of `rescale`: a positive power for the short form, else the shift
 * minus 64. */
static inline int32_t slip_to_int8(
    int32_t sum, const int32_t *pair, int32_t zero, int32_t low, int32_t high) {
  if (pair[1] > 0) return slip_narrow(sum, pair[0], pair[1], zero);
  int32_t value = slip_rescale(sum, pair[0], -(pair[1] + 64));
  return slip_clamp(slip_sum(value, zero), low, high);
}

#ifdef SLIP_HELIUM
/* Rescale four sums by four pairs of `rescale` and clamp them. `vqrdmulh` is the first rounding,
 * `vrmulh` the second of the short form. The long form, which all channels take or none, shifts left
 * before the first rounding and right as the second: `vrshl` rounds half up, and the sign added
 * before makes it half away from zero. */
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

/* Two 16-bit halves of a word: sign-extended bytes 0 and 2, or 1 and 3. */
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
