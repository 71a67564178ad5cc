/* Embedding tables whose rows are hashed blocks of one shared array: a plain C ABI.
 *
 * See src/robe/hash.h for where a row's numbers lie. Calls whose ids or offsets do not pass
 * slipstream_bags_check, or whose shapes do not fit, do nothing but return SLIPSTREAM_INVALID.
 */
#ifndef SLIPSTREAM_ROBE_H
#define SLIPSTREAM_ROBE_H

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

enum slipstream_robe_mode { SLIPSTREAM_SUM = 0, SLIPSTREAM_MEAN = 1, SLIPSTREAM_MAX = 2 };

/* Each one is a row of int64 in a tensor. */
typedef struct slipstream_robe_table {
  uint64_t key;    /* from the seed and the table's number */
  int64_t rows;
  int64_t dim;
  int64_t padding; /* an id that counts as absent, or -1 */
} slipstream_robe_table;

/* Bags as in slipstream_bags_check. Table t fills `dim` columns of the result after those of the
 * tables before it; the result is [bags, width], width being the sum of the tables' dims. */
typedef struct slipstream_robe_lookup {
  const slipstream_robe_table *tables;
  int64_t table_count;
  int64_t bags;
  int64_t width;
  const void *ids;
  int64_t count;
  const int64_t *offsets; /* null: bags of the same size */
  int64_t offset_count;
  const float *weights;   /* [count], or null for ones */
  int64_t size;           /* floats in the shared array */
  int64_t block;          /* 1 to size */
  int32_t id_bytes;
  int32_t sign;
  int32_t mode;
  int32_t threads;
} slipstream_robe_lookup;

/* Kernels of this build, whether or not this processor can run them: numbered from 0. */
SLIPSTREAM_API int32_t slipstream_robe_kernel_count(void);
SLIPSTREAM_API const char *slipstream_robe_level(int32_t kernel);

/* The caller has made sure that this processor runs the kernel. The number of threads changes no
 * bit of any result. */

/* result[bags, width] from array[size]. */
SLIPSTREAM_API int32_t slipstream_robe_forward(int32_t kernel, const slipstream_robe_lookup *lookup,
                                               const float *array, float *result);

/* Adds to gradient[size] what `result_gradient` [bags, width] gives it, times `scale`. `array` and
 * `result` are read in mode max only: an element's gradient goes to the first id of its bag that
 * has the largest number. */
SLIPSTREAM_API int32_t slipstream_robe_backward(int32_t kernel,
                                                const slipstream_robe_lookup *lookup,
                                                const float *result_gradient, float scale,
                                                const float *array, const float *result,
                                                float *gradient);

/* weight_gradient[count]: inner products of rows and their bags' gradients; mode sum. */
SLIPSTREAM_API int32_t slipstream_robe_weight_gradient(int32_t kernel,
                                                       const slipstream_robe_lookup *lookup,
                                                       const float *result_gradient,
                                                       const float *array, float *weight_gradient);

#ifdef __cplusplus
}
#endif

#endif
