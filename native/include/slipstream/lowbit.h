/* Matrix multiplication with weights and activations of 1 to 8 bits: a plain C ABI.
 *
 * Values are unsigned bytes, w < 2^wbits and a < 2^abits (a may also be signed bytes, see below);
 * results are exact modulo 2^32. Strides are in elements. Functions that return `int32_t` give a
 * `slipstream_status` of engine.h. None throws; packed weights are immutable and may be used from
 * many threads at once.
 */
#ifndef SLIPSTREAM_LOWBIT_H
#define SLIPSTREAM_LOWBIT_H

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kernels of this build, whether or not this processor can run them: numbered from 0. */
SLIPSTREAM_API int32_t slipstream_lowbit_kernel_count(void);
SLIPSTREAM_API const char *slipstream_lowbit_scheme(int32_t kernel);
SLIPSTREAM_API const char *slipstream_lowbit_level(int32_t kernel);
SLIPSTREAM_API uint32_t slipstream_lowbit_features(int32_t kernel);
SLIPSTREAM_API int32_t slipstream_lowbit_supports(int32_t kernel, int32_t wbits, int32_t abits);

/* The kernel's multiplications on registers alone, `rounds` times over: the most it could do here.
 * Returns the number of products, 0 where the kernel has no such loop. */
SLIPSTREAM_API int64_t slipstream_lowbit_spin(int32_t kernel, int64_t rounds);

typedef struct slipstream_lowbit_weights slipstream_lowbit_weights;

/* Packs w[n][k]. `zero_points` [n] are subtracted from the rows' values; NULL for none. The caller
 * has made sure that this processor runs the kernel and that values are in range. */
SLIPSTREAM_API int32_t slipstream_lowbit_pack(int32_t kernel, int64_t n, int64_t k, int32_t wbits,
                                              int32_t abits, const uint8_t *w, int64_t ldw,
                                              const int32_t *zero_points,
                                              slipstream_lowbit_weights **out);
SLIPSTREAM_API void slipstream_lowbit_free(slipstream_lowbit_weights *weights);
SLIPSTREAM_API int64_t slipstream_lowbit_bytes(const slipstream_lowbit_weights *weights);

/* out[i][j] = sum over k of (a[i][k] - activation_zero) * (w[j][k] - zero_points[j]).
 * With `is_signed`, a is signed bytes, -2^(abits-1) <= a < 2^(abits-1).
 * SLIPSTREAM_INVALID: a value of a is out of range; `out` then holds nothing of use. */
SLIPSTREAM_API int32_t slipstream_lowbit_multiply(const slipstream_lowbit_weights *weights,
                                                  const uint8_t *a, int32_t is_signed, int64_t m,
                                                  int64_t lda, int32_t activation_zero,
                                                  int32_t *out, int64_t ldo, int32_t threads);

/* The same between float matrices: x is rounded to integers (to nearest, ties to even) as
 *     a = clamp(round(x / activation_scale) + activation_zero, 0, 2^abits - 1)
 * multiplied, and y[i][j] = max(scale[j] * product[i][j] + bias[j], floor). `bias` may be NULL;
 * `floor` is 0 for a ReLU, minus infinity for none. Where a row of x holds what is not a number, all
 * of the row of y is not a number.
 */
SLIPSTREAM_API int32_t slipstream_lowbit_linear(const slipstream_lowbit_weights *weights,
                                                const float *x, int64_t m, int64_t ldx,
                                                float activation_scale, int32_t activation_zero,
                                                const float *scale, const float *bias, float floor,
                                                float *y, int64_t ldy, int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
