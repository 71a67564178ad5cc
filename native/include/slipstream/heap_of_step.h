/* What a step allocates and frees, and its heap: a plain C ABI. */
#ifndef SLIPSTREAM_HEAP_OF_STEP_H
#define SLIPSTREAM_HEAP_OF_STEP_H

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* By how much what is allocated changes, in order, where tasks run one after the other in the order
 * of their numbers: at the start of each what it produces, at its end what it releases, in ascending
 * order. Allocation i has nbytes[i], the task `producer[i]` (negative: before the step) and the task
 * `release[i]` (negative: after it). `out_change` has a place for each of those within the step. */
SLIPSTREAM_API int32_t slipstream_changes_in_turn(const int64_t *nbytes, const int32_t *producer,
                                                  const int32_t *release, int64_t count,
                                                  int64_t tasks, int64_t *out_change);

/* Bytes by which the heap grows in the last of at most `cycles` steps. It holds `begin` bytes
 * before each; `change[count]` are its allocations and frees, in order. Of what lies free at its top
 * it gives everything back once that is more than `kept`. */
SLIPSTREAM_API int64_t slipstream_heap_growth(const int64_t *change, int64_t count, int64_t begin,
                                              double kept, int32_t cycles);

#ifdef __cplusplus
}
#endif

#endif
