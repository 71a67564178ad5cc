// Programs of the list language: running many, and searching for one that meets examples.

#ifndef SLIPSTREAM_SYNTHESIS_H
#define SLIPSTREAM_SYNTHESIS_H

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SLIPSTREAM_SYNTHESIS_LIST 20      // longest list
#define SLIPSTREAM_SYNTHESIS_EXAMPLES 32  // most inputs
#define SLIPSTREAM_SYNTHESIS_LENGTH 16    // longest program

// Inputs, and outputs for the first `examples` of them. A search only needs programs to be valid on
// those; the others tell programs apart.
typedef struct {
  int32_t inputs, examples, is_list;
  const int16_t *numbers;        // [inputs]
  const int16_t *lists;          // [inputs][last, before][SLIPSTREAM_SYNTHESIS_LIST]
  const int16_t *counts;         // [inputs][last, before]
  const int16_t *wanted;         // [examples][SLIPSTREAM_SYNTHESIS_LIST], or a number and zeros
  const int16_t *wanted_counts;  // [examples]
} slipstream_synthesis_task;

typedef struct {
  int64_t max_candidates;
  double max_seconds;
  int32_t max_length, extra;  // extra: lengths searched beyond the shortest program
  int32_t capacity;           // rows of SLIPSTREAM_SYNTHESIS_LENGTH in `programs`
  uint8_t *programs;
  int32_t *lengths;
  // Results: programs tried and found; the length up to which all were tried.
  int64_t candidates;
  int32_t found, complete;
  double seconds;
} slipstream_synthesis_search;

SLIPSTREAM_API int32_t slipstream_synthesis_kernel_count(void);
SLIPSTREAM_API const char *slipstream_synthesis_level(int32_t kernel);

// Runs programs of `length` functions. Counts of results: -1 for a number, -2 where the program is
// invalid. Only `valid` is written if `lists` is null.
SLIPSTREAM_API int32_t slipstream_synthesis_run(
    int32_t kernel, const slipstream_synthesis_task *task, const uint8_t *programs, int64_t count,
    int32_t length, uint8_t *valid, int16_t *lists, int16_t *counts, int32_t threads);

// Tries all programs up to a length, shortest first, one for each state they reach.
SLIPSTREAM_API int32_t slipstream_synthesis_enumerate(
    int32_t kernel, const slipstream_synthesis_task *task, slipstream_synthesis_search *search);

#ifdef __cplusplus
}
#endif

#endif
