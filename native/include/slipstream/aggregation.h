// Sums of vectors over datagrams: an aggregator adds what the members of a job send, piece by piece,
// always in the members' order, and sends every member the sum. Linux only.
//
// A vector is cut into pieces, one per datagram. Pieces of all sums of a job are numbered through;
// piece s uses slot s % slots. A member has at most `slots / 2` pieces without a result, counted from
// the first such one. Then every member has the result of piece s - slots before any member sends
// piece s: a slot is never reused while its result could be requested again.
//
// The result is the acknowledgement. A member repeats a piece when later ones have been answered, or
// after a time-out; the aggregator repeats the result, or reports whose pieces are missing.
//
// Source: Gebara, Ghobadi, Costa, "In-network aggregation for shared machine learning clusters",
// MLSys 2021; two generations of slots as in Sapio et al., "Scaling distributed machine learning
// with in-network aggregation" (SwitchML), NSDI 2021.
#pragma once

#include <stdint.h>

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SLIPSTREAM_SUM_FLOAT32 = 0, SLIPSTREAM_SUM_FLOAT64 = 1, SLIPSTREAM_SUM_INT32 = 2 };

typedef struct slipstream_aggregator slipstream_aggregator;
typedef struct slipstream_member slipstream_member;

// Two members that send different things as the same piece.
typedef struct {
  int32_t job, member, other, same_dtype;
  int64_t values, other_values;  // of the whole vector
} slipstream_mismatch;

// Why a sum ended early.
enum {
  SLIPSTREAM_SUM_DONE = 0,
  SLIPSTREAM_SUM_ABORTED = 1,   // by `abort`
  SLIPSTREAM_SUM_SILENT = 2,    // no answer of the aggregator
  SLIPSTREAM_SUM_WAITING = 3,   // other members did not send
  SLIPSTREAM_SUM_TOO_LARGE = 4, // a datagram is larger than the path allows
  SLIPSTREAM_SUM_ERROR = 5      // errno in `detail`
};

typedef struct {
  uint64_t missing;      // members that did not send the first piece without a result
  int64_t above;         // whether they are members of another aggregator
  int64_t detail;
  int64_t sent, repeated;  // pieces
  double window;         // pieces, now
  uint64_t windows;      // hash of all windows so far: equal on all members
} slipstream_sum_report;

SLIPSTREAM_API int slipstream_aggregation_abi(void);

// `socket`: a datagram socket, read and written only by `serve`.
SLIPSTREAM_API slipstream_aggregator *slipstream_aggregator_create(int32_t socket);
SLIPSTREAM_API void slipstream_aggregator_free(slipstream_aggregator *self);
// `keys`: [members], a secret of each. `parent`: the socket address of the aggregator that sums
// further, under the same job number; null at the root.
SLIPSTREAM_API int slipstream_aggregator_add(slipstream_aggregator *self, int32_t job,
                                             int32_t members, int32_t slots, int32_t payload_bytes,
                                             const uint64_t *keys, const void *parent,
                                             int32_t parent_bytes, int32_t parent_member,
                                             uint64_t parent_key);
SLIPSTREAM_API int slipstream_aggregator_remove(slipstream_aggregator *self, int32_t job);
// Serves datagrams for a while. Returns whether two members differ; `out` has which.
SLIPSTREAM_API int slipstream_aggregator_serve(slipstream_aggregator *self, int32_t milliseconds,
                                               slipstream_mismatch *out);
// out: [4] datagrams received, refused, repeated, and pieces summed.
SLIPSTREAM_API int slipstream_aggregator_counts(slipstream_aggregator *self, int64_t *out);

// `socket`: connected to the aggregator.
SLIPSTREAM_API slipstream_member *slipstream_member_create(int32_t socket, int32_t job,
                                                           int32_t member, uint64_t key,
                                                           int32_t slots, int32_t payload_bytes);
SLIPSTREAM_API void slipstream_member_free(slipstream_member *self);
// Ends the present sum and all later ones; from any thread.
SLIPSTREAM_API int slipstream_member_abort(slipstream_member *self);
// `values` of `dtype` from `input`, whose sum over members goes to `output`.
SLIPSTREAM_API int slipstream_member_sum(slipstream_member *self, int32_t dtype, const void *input,
                                         void *output, int64_t values, double silent_s,
                                         double timeout_s, slipstream_sum_report *out);

#ifdef __cplusplus
}
#endif
