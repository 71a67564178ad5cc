/* Sums of the rows that Adasum combines, and the combination: a plain C ABI.
 *
 * `rows` are vectors of the same `count` numbers, one a worker, float32 or float64, that consist of
 * `layers` pieces: piece l is numbers starts[l] to starts[l + 1]. Pieces may be empty.
 */
#ifndef SLIPSTREAM_ADASUM_H
#define SLIPSTREAM_ADASUM_H

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

enum slipstream_adasum_dtype { SLIPSTREAM_ADASUM_FLOAT32 = 0, SLIPSTREAM_ADASUM_FLOAT64 = 1 };

/* Kernels of this build, whether or not this processor can run them: numbered from 0. */
SLIPSTREAM_API int32_t slipstream_adasum_kernel_count(void);
SLIPSTREAM_API const char *slipstream_adasum_level(int32_t kernel);

/* products[layers][workers][workers]: scalar products of the pieces of every two rows, in float64,
 * each the sum of 16 partial sums; see src/adasum/kernel.h for the order. */
SLIPSTREAM_API int32_t slipstream_adasum_products(int32_t kernel, int32_t dtype,
                                                  const void *const *rows, int64_t workers,
                                                  const int64_t *starts, int64_t layers,
                                                  double *products);

/* out = sum of weights[l][w] * rows[w] over the workers, piece by piece, in the rows' own dtype and
 * in the order of the workers. `out` may be one of the rows. */
SLIPSTREAM_API int32_t slipstream_adasum_combine(int32_t kernel, int32_t dtype,
                                                 const void *const *rows, int64_t workers,
                                                 const int64_t *starts, int64_t layers,
                                                 const double *weights, void *out);

#ifdef __cplusplus
}
#endif

#endif
