/* Dropout in one pass over memory: a plain C ABI.
 *
 * y = keep ? scale * x : 0, where `keep` follows from the seed and an element's number alone: the
 * backward pass draws it again from the same seed. See src/dropout/kernel.h for what is drawn.
 */
#ifndef SLIPSTREAM_DROPOUT_H
#define SLIPSTREAM_DROPOUT_H

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

enum slipstream_dropout_dtype { SLIPSTREAM_FLOAT32 = 0, SLIPSTREAM_BFLOAT16 = 1 };

/* Kernels of this build, whether or not this processor can run them: numbered from 0. */
SLIPSTREAM_API int32_t slipstream_dropout_kernel_count(void);
SLIPSTREAM_API const char *slipstream_dropout_level(int32_t kernel);

/* y[count] from x[count], which may be the same memory. An element is dropped with probability
 * threshold / 2^32. `seed` is two numbers of 64 bits: the key, and the upper half of the counter.
 * The caller has made sure that this processor runs the kernel. */
SLIPSTREAM_API int32_t slipstream_dropout(int32_t kernel, int32_t dtype, const void *x, void *y,
                                          int64_t count, const uint64_t *seed, uint32_t threshold,
                                          float scale, int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
