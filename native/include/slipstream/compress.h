/* Encoders and decoders of compressed gradients: a plain C ABI.
 *
 * Numbers are float32. `residual` is what error feedback kept of earlier steps: an encoder adds the
 * gradient to it and leaves in it what it did not send. Every kernel gives the same bits, those of
 * slipstream/techniques/distributed/compression/_reference.py.
 */
#ifndef SLIPSTREAM_COMPRESS_H
#define SLIPSTREAM_COMPRESS_H

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kernels of this build, whether or not this processor can run them: numbered from 0. In what
 * follows, the caller has made sure that this processor runs `kernel`. */
SLIPSTREAM_API int32_t slipstream_compress_kernel_count(void);
SLIPSTREAM_API const char *slipstream_compress_level(int32_t kernel);

/* 1 where no number is NaN, infinite, or so large that sums of them may be. */
SLIPSTREAM_API int32_t slipstream_compress_finite(int32_t kernel, const float *x, int64_t count);

/* Blocks of consecutive numbers, `block` b from offset[b] with length[b]; its codes start at
 * byte position[b] of `codes`. bits is 1 (signs and the mean magnitude), 4 or 8 (rounded multiples
 * of a scale that is a bfloat16). gradient[], residual[]: of the bucket; scales[blocks]. */
SLIPSTREAM_API int32_t slipstream_compress_blocks_encode(
    int32_t kernel, int32_t bits, const float *gradient, float *residual, int64_t blocks,
    const int64_t *offset, const int64_t *length, const int64_t *position, float *scales,
    uint8_t *codes);

/* out[] = decoded * weight, or += where `add`. */
SLIPSTREAM_API int32_t slipstream_compress_blocks_decode(
    int32_t kernel, int32_t bits, const float *scales, const uint8_t *codes, int64_t blocks,
    const int64_t *offset, const int64_t *length, const int64_t *position, float weight,
    int32_t add, float *out);

/* The k largest magnitudes of gradient + residual, the lower index first among equals, in the order
 * of their indices; the residual keeps the others. */
SLIPSTREAM_API int32_t slipstream_compress_top(int32_t kernel, const float *gradient,
                                               float *residual, int64_t count, int64_t k,
                                               int32_t *indices, float *values);

/* out[indices[i]] += values[i] * weight */
SLIPSTREAM_API int32_t slipstream_compress_scatter(const int32_t *indices, const float *values,
                                                   int64_t k, float weight, float *out,
                                                   int64_t count);

/* PowerSGD of one matrix M [rows][columns], with p [rank][rows] and q [rank][columns]. */
/* residual += gradient, which is M from then on; p = q M^T */
SLIPSTREAM_API int32_t slipstream_compress_project(int32_t kernel, const float *gradient,
                                                   float *residual, int64_t rows, int64_t columns,
                                                   int32_t rank, const float *q, float *p);
/* The rows of p orthonormal; those that depend on earlier ones become zero. */
SLIPSTREAM_API int32_t slipstream_compress_orthonormalise(int32_t kernel, float *p, int64_t rows,
                                                          int32_t rank);
/* q = p M */
SLIPSTREAM_API int32_t slipstream_compress_project_back(int32_t kernel, const float *residual,
                                                        int64_t rows, int64_t columns, int32_t rank,
                                                        const float *p, float *q);
/* out = p^T q; residual -= out */
SLIPSTREAM_API int32_t slipstream_compress_reconstruct(int32_t kernel, const float *p,
                                                       const float *q, int64_t rows,
                                                       int64_t columns, int32_t rank,
                                                       float *residual, float *out);

#ifdef __cplusplus
}
#endif

#endif
