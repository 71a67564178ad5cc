/* Are the ids and offsets of embedding bags what they must be? A plain C ABI. */
#ifndef SLIPSTREAM_BAGS_H
#define SLIPSTREAM_BAGS_H

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

enum slipstream_bags_fault {
  SLIPSTREAM_BAGS_FINE = 0,
  SLIPSTREAM_BAGS_ID = 1,      /* an id outside its table */
  SLIPSTREAM_BAGS_OFFSET = 2   /* offsets do not rise from 0 to at most `count` */
};

/* `ids[count]` of `id_bytes` (4 or 8) each, in tables * bags bags; bag number t * bags + b is of
 * table t, which has rows[t * rows_stride] rows. Bag g is ids[offsets[g]] up to the next offset, or
 * up to `count` where there is none; without offsets all bags have the same number of ids.
 * Where something is wrong, *where is its place in `ids` or `offsets`. */
SLIPSTREAM_API int32_t slipstream_bags_check(const void *ids, int32_t id_bytes, int64_t count,
                                             const int64_t *offsets, int64_t offset_count,
                                             const int64_t *rows, int64_t rows_stride,
                                             int64_t tables, int64_t bags, int64_t *where);

#ifdef __cplusplus
}
#endif

#endif
