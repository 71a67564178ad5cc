/* Allocations and frees of a step, and the growth of its heap: a plain C ABI. */
#ifndef SLIPSTREAM_HEAP_OF_STEP_H
#define SLIPSTREAM_HEAP_OF_STEP_H

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Changes of the allocated bytes, in order, if tasks run sequentially by their numbers: at the
 * start of each task its allocations, at its end its frees, in ascending order. Allocation i has
 * nbytes[i], the task `producer[i]` (negative: before the step) and the task `release[i]`
 * (negative: after it). `out_change` has a place for each of those within the step. */
SLIPSTREAM_API int32_t slipstream_changes_in_turn(const int64_t *nbytes, const int32_t *producer,
                                                  const int32_t *release, int64_t count,
                                                  int64_t tasks, int64_t *out_change);

/* Bytes by which the heap grows in the last of at most `cycles` steps. It holds `begin` bytes
 * before each; `change[count]` are its allocations and frees, in order. The free bytes at its top
 * are returned to the system if they exceed `kept`. */
SLIPSTREAM_API int64_t slipstream_heap_growth(const int64_t *change, int64_t count, int64_t begin,
                                              double kept, int32_t cycles);

#ifdef __cplusplus
}
#endif

#endif
