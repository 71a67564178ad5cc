/* Embedding tables that are tensor trains of three cores, with cached rows: a plain C ABI.
 *
 * Row id has the digits first, middle, last to the bases rows[0..2], the most significant first, and
 * is G_1[first] G_2[middle] G_3[last]: core t is [rows[t], R_(t-1), columns[t], R_t], R_0 = R_3 = 1.
 * Calls whose ids or offsets do not pass slipstream_bags_check, or whose shapes do not fit, do
 * nothing but return SLIPSTREAM_INVALID; SLIPSTREAM_NO_MEMORY where a micro-batch finds no memory.
 */
#ifndef SLIPSTREAM_TT_H
#define SLIPSTREAM_TT_H

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

enum slipstream_tt_mode { SLIPSTREAM_TT_SUM = 0, SLIPSTREAM_TT_MEAN = 1 };

/* Bags as in slipstream_bags_check, of one table. */
typedef struct slipstream_tt_lookup {
  const float *cores[3];
  int64_t rows[3];
  int64_t columns[3];
  int64_t ranks[2];
  int64_t num_embeddings; /* at most the product of `rows` */
  int64_t padding;        /* an id that counts as absent, or -1 */
  const float *cache;     /* [cache_rows, product of `columns`], or null */
  int64_t cache_rows;
  const int64_t *hot;     /* [hot_capacity, 2]: ids, or -1, and their rows in the cache; an id is
                             searched from the top bits of id * 0x9E3779B97F4A7C15 on */
  int64_t hot_capacity;   /* a power of two; one place at least is free */
  int64_t bags;
  const void *ids;
  int64_t count;
  const int64_t *offsets; /* null: bags of the same size */
  int64_t offset_count;
  const float *weights;   /* [count], or null for ones */
  int32_t id_bytes;
  int32_t mode;
  int32_t threads;
} slipstream_tt_lookup;

/* Kernels of this build, whether or not this processor can run them: numbered from 0. */
SLIPSTREAM_API int32_t slipstream_tt_kernel_count(void);
SLIPSTREAM_API const char *slipstream_tt_level(int32_t kernel);

/* The caller has made sure that this processor runs the kernel. Neither the kernel nor the number of
 * threads changes a bit of any result. */

/* result[bags, product of `columns`]. */
SLIPSTREAM_API int32_t slipstream_tt_forward(int32_t kernel, const slipstream_tt_lookup *lookup,
                                             float *result);

/* Adds to the cores' gradients, and to the cache's where there is one. */
SLIPSTREAM_API int32_t slipstream_tt_backward(int32_t kernel, const slipstream_tt_lookup *lookup,
                                              const float *result_gradient, float *first,
                                              float *middle, float *last, float *cache);

/* weight_gradient[count]: inner products of rows and their bags' gradients; mode sum. */
SLIPSTREAM_API int32_t slipstream_tt_weight_gradient(int32_t kernel,
                                                     const slipstream_tt_lookup *lookup,
                                                     const float *result_gradient,
                                                     float *weight_gradient);

/* Counts look-ups of cached rows, hits[their row] += 1, and lists the other ids in their order in
 * missed[count], which may be `ids` itself. Their number, or -1 where the table of hot rows, as in
 * slipstream_tt_lookup, names a row the cache lacks. */
SLIPSTREAM_API int64_t slipstream_tt_count(const int64_t *hot, int64_t hot_capacity,
                                           int64_t cache_rows, const int64_t *ids, int64_t count,
                                           int64_t *hits, int64_t *missed);

#ifdef __cplusplus
}
#endif

#endif
