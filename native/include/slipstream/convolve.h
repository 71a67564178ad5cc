/* Convolutions of codes, and what stands before and behind a low-bit product: a plain C ABI.
 *
 * Images are in NHWC order. Everything here equals its Python reference to the bit, whatever the
 * instruction set; with `wide` the loops compiled for AVX2 are taken where this build has them, and
 * the caller has made sure that the processor runs them. Nothing throws.
 */
#ifndef SLIPSTREAM_CONVOLVE_H
#define SLIPSTREAM_CONVOLVE_H

#include "slipstream/lowbit.h"

#ifdef __cplusplus
extern "C" {
#endif

/* codes[i] = clamp(round(x[i] / scale) + zero, 0, top), ties to even. SLIPSTREAM_INVALID: some x[i]
 * is not a number; its code is then any. */
SLIPSTREAM_API int32_t slipstream_quantise(int32_t wide, const float *x, int64_t n, float scale,
                                           int32_t zero, int32_t top, uint8_t *codes);

/* What becomes of products: scale[j] * product + bias[j] + added, held within floor and ceiling, as
 * float, or quantised as above, or both. With `binary`, weights 0 and 1 stand for -1 and 1, and the
 * column behind the last holds what the activations add up to:
 * product = 2 * product[j] - product[columns]. */
typedef struct slipstream_epilogue {
  const float *scale; /* [columns] */
  const float *bias;  /* [columns], or NULL */
  float floor;        /* 0 for a ReLU, minus infinity for none */
  float ceiling;      /* 6 for a ReLU6, infinity for none */
  int32_t binary;
  float code_scale; /* of the codes that are written; 0: floats are */
  int32_t code_zero;
  int32_t code_top;
} slipstream_epilogue;

/* What products are added to and where results go: matrices of `columns`, dense. */
typedef struct slipstream_result {
  const float *added; /* or NULL */
  float *floats;      /* or NULL where only codes are wanted */
  uint8_t *codes;     /* read where code_scale > 0 */
} slipstream_result;

/* Rows of `columns` products, each row `ldp` after the one before. */
SLIPSTREAM_API int32_t slipstream_finish(int32_t wide, const slipstream_epilogue *epilogue,
                                         const int32_t *products, int64_t ldp, int64_t rows,
                                         int64_t columns, const slipstream_result *result);

typedef struct slipstream_convolution {
  int64_t images, height, width, channels;
  int64_t kernel_height, kernel_width;
  int64_t stride_height, stride_width;
  int64_t padding_height, padding_width;
  int64_t dilation_height, dilation_width;
  int64_t out_height, out_width;
} slipstream_convolution;

/* Rows first <= i < last of the matrix whose row i is what output pixel i sees, of
 * kernel_height * kernel_width * channels codes; `outside` stands for what lies beyond the image. */
SLIPSTREAM_API void slipstream_patches(const slipstream_convolution *shape, const uint8_t *codes,
                                       uint8_t outside, int64_t first, int64_t last,
                                       uint8_t *rows);

/* A whole layer: patches, products and epilogue of some output pixels at a time, so that neither
 * patches nor products leave the caches. `weights` have one row more than there are output channels
 * if the epilogue is binary. */
SLIPSTREAM_API int32_t slipstream_convolve(int32_t wide, const slipstream_convolution *shape,
                                           const uint8_t *codes, int32_t activation_zero,
                                           const slipstream_lowbit_weights *weights,
                                           int64_t out_channels,
                                           const slipstream_epilogue *epilogue,
                                           const slipstream_result *result, int32_t threads);

/* The same for a depthwise layer: each channel has its own weights, as many as the kernel has
 * pixels. They are stored in pairs, [(pixels + 1) / 2][channels][2], the last one 0 if their number
 * is odd. SLIPSTREAM_INVALID: some code has more than `activation_bits` bits. */
SLIPSTREAM_API int32_t slipstream_depthwise(int32_t wide, const slipstream_convolution *shape,
                                            const uint8_t *codes, int32_t activation_zero,
                                            int32_t activation_bits, const int16_t *weights,
                                            const slipstream_epilogue *epilogue,
                                            const slipstream_result *result, int32_t threads);

/* The greatest code each output pixel sees, channel by channel; pixels outside the image are less
 * than any. Every output pixel sees part of the image. */
SLIPSTREAM_API int32_t slipstream_max_pool(int32_t wide, const slipstream_convolution *shape,
                                           const uint8_t *codes, uint8_t *out);

#ifdef __cplusplus
}
#endif

#endif
