/* The event engine of slipstream: a plain C ABI.
 *
 * Times are float64 nanoseconds, sizes float64 bytes, rates float64 bytes per nanosecond, counts
 * int64, task / lane / resource / link numbers int32. Arrays belong
 * to the caller and are only read during the call, unless the name says `out`. An optional array
 * may be NULL. Every struct begins with `struct_bytes` = sizeof(the struct as the caller knows it):
 * members are only ever appended, and what a caller does not know about reads as zero.
 *
 * No function throws, and none keeps global state: a compiled program is immutable and may be
 * simulated from many threads at once.
 */
#ifndef SLIPSTREAM_ENGINE_H
#define SLIPSTREAM_ENGINE_H

#include <stdint.h>

#if defined(_WIN32)
#define SLIPSTREAM_API __declspec(dllexport)
#else
#define SLIPSTREAM_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised by one whenever a function or a struct member changes meaning. Appending does not. */
#define SLIPSTREAM_ENGINE_ABI 3

enum slipstream_status {
  SLIPSTREAM_OK = 0,
  SLIPSTREAM_INVALID = 1,     /* an argument is out of range; `element` is its index */
  SLIPSTREAM_CYCLE = 2,       /* dependencies and fixed orders form a cycle; see `cycle` */
  SLIPSTREAM_NO_MEMORY = 3,   /* an allocation failed; nothing was leaked */
  SLIPSTREAM_TOO_MUCH = 4,    /* resimulation gave up: a full pass is cheaper */
  SLIPSTREAM_STUCK = 5        /* internal error: tasks left over without a cycle */
};

enum slipstream_policy {
  SLIPSTREAM_FIXED = 0,
  SLIPSTREAM_FIFO = 1,
  SLIPSTREAM_PRIORITY = 2,
  SLIPSTREAM_PREEMPTIVE = 3,
  SLIPSTREAM_CONCURRENT = 4   /* any number of tasks at once; no gaps, no resources */
};

typedef struct slipstream_error {
  uint64_t struct_bytes;
  int64_t element;       /* out: index of the offending element, or -1 */
  int32_t *cycle;        /* caller's buffer for the tasks of one cycle, or NULL */
  int64_t cycle_capacity;
  int64_t cycle_length;  /* out: length of the cycle, even where the buffer is shorter */
  char message[256];     /* out: NUL-terminated */
} slipstream_error;

typedef struct slipstream_program_input {
  uint64_t struct_bytes;
  int64_t tasks;
  int64_t lanes;
  int64_t steps;
  int64_t edges;
  int64_t resources;
  const int32_t *lane;          /* [tasks] */
  const double *gap_ns;         /* [tasks], optional */
  const int32_t *priority;      /* [tasks], optional; smaller is more urgent */
  const uint8_t *policy;        /* [lanes], slipstream_policy */
  const double *quantum_ns;     /* [lanes], optional */
  const int32_t *edge_src;      /* [edges] */
  const int32_t *edge_dst;      /* [edges] */
  const double *edge_delay_ns;  /* [edges], optional */
  const uint8_t *edge_lag;      /* [edges], optional; 0 or 1 */
  const int64_t *capacity;      /* [resources] */
  const int64_t *need_offset;   /* [tasks + 1], optional: CSR over need_* */
  const int32_t *need_resource; /* each resource at most once per task */
  const int64_t *need_amount;   /* positive */
  /* Transfers. A task with `flow_bytes` > 0 takes its duration first (latency), then moves its
   * bytes over the links of its path, at a rate that the links' other flows leave it: see
   * network.h. Not on preemptive lanes. */
  int64_t links;
  const double *link_capacity;  /* [links], positive where a path goes */
  const double *flow_bytes;     /* [tasks], optional: no transfers */
  const double *flow_weight;    /* [tasks], positive; optional: 1 */
  const int64_t *path_offset;   /* [tasks + 1]: CSR over path_link */
  const int32_t *path_link;     /* each link at most once per path */
  /* Transfers as packets instead of fluids, see packets.h; weights are not looked at. */
  const double *link_latency_ns;  /* [links], optional: fluids */
  const double *link_queue_bytes; /* [links]: room for packets that wait */
  const double *link_mark_bytes;  /* [links]: beyond it they are marked */
  double payload_bytes;           /* of a packet, positive */
  double header_bytes;
  double first_window;            /* packets, at least 1 */
  double max_window;
  double timeout_ns;              /* positive */
  /* [path_offset[tasks]], optional: transfers over trees of switches that sum, see packets.h. Such a
   * task has its links to the root, then those back in the same order; the first half has the place
   * of the next link to the root, which is a later one, or -1 for the last. -2 for all others. */
  const int32_t *tree_parent;
} slipstream_program_input;

typedef struct slipstream_program slipstream_program;
typedef struct slipstream_plan slipstream_plan;

SLIPSTREAM_API int32_t slipstream_engine_abi(void);

/* Bits of `slipstream_cpu_features`. */
#define SLIPSTREAM_CPU_AVX2 (1u << 0)              /* with FMA */
#define SLIPSTREAM_CPU_AVX512 (1u << 1)            /* F, BW, DQ and VL */
#define SLIPSTREAM_CPU_AVX512_VNNI (1u << 2)
#define SLIPSTREAM_CPU_AVX512_VBMI (1u << 3)
#define SLIPSTREAM_CPU_AVX512_VPOPCNTDQ (1u << 4)
#define SLIPSTREAM_CPU_NEON (1u << 5)
#define SLIPSTREAM_CPU_DOTPROD (1u << 6)
#define SLIPSTREAM_CPU_AVX_VNNI (1u << 7)
#define SLIPSTREAM_CPU_AMX_INT8 (1u << 8)          /* and the process may use tiles */

/* What this processor and operating system can run; bit 31 is set when the answer is known. */
SLIPSTREAM_API uint32_t slipstream_cpu_features(void);

/* `count` additions each of which waits for the one before, a cycle each: what a clock is read by. */
SLIPSTREAM_API void slipstream_spin(int64_t count);

/* Builds what does not depend on durations. Free with slipstream_program_free. */
SLIPSTREAM_API int32_t slipstream_program_compile(const slipstream_program_input *input,
                                                  slipstream_program **out_program,
                                                  slipstream_error *error);
SLIPSTREAM_API void slipstream_program_free(slipstream_program *program);

/* Whether one pass in topological order is enough (all lanes fixed, no resources). */
SLIPSTREAM_API int32_t slipstream_program_is_fixed_order(const slipstream_program *program);

typedef struct slipstream_simulate_args {
  uint64_t struct_bytes;
  const double *duration_ns; /* [tasks] */
  double *out_start_ns;      /* [steps * tasks] */
  double *out_end_ns;        /* [steps * tasks] */
  double *out_step_end_ns;   /* [steps]: latest end of each step */
  int32_t force_event_loop;  /* non-zero: do not take the fixed-order pass (for tests) */
  int32_t reserved;
  /* Every change of a flow's rate or bottleneck, in order; a flow that ends is not listed again. */
  int64_t changes_capacity;      /* room in out_change_*; 0: not wanted */
  double *out_change_ns;
  double *out_change_rate;
  int32_t *out_change_instance;
  int32_t *out_change_link;      /* the flow's bottleneck */
  int64_t out_changes;           /* how many there were, even where there is less room */
  /* Of packets; optional, added to. */
  double *out_queue_peak;        /* [links]: most bytes that waited */
  int64_t *out_dropped;          /* [links] */
  int64_t *out_marked;           /* [links] */
  int64_t *out_sent_again;       /* [steps * tasks] */
} slipstream_simulate_args;

SLIPSTREAM_API int32_t slipstream_simulate(const slipstream_program *program,
                                           slipstream_simulate_args *args,
                                           slipstream_error *error);

/* Tables for re-simulation of a fixed-order program, shared by all its baselines. */
SLIPSTREAM_API int32_t slipstream_plan_create(const slipstream_program *program,
                                              slipstream_plan **out_plan,
                                              slipstream_error *error);
SLIPSTREAM_API void slipstream_plan_free(slipstream_plan *plan);
SLIPSTREAM_API int64_t slipstream_plan_blocks(const slipstream_plan *plan);
SLIPSTREAM_API int64_t slipstream_plan_block_tasks(const slipstream_plan *plan);

/* out_block_end_ns [steps * blocks]: latest end in each block of the baseline. */
SLIPSTREAM_API void slipstream_plan_block_ends(const slipstream_plan *plan, const double *end_ns,
                                               double *out_block_end_ns);

typedef struct slipstream_resimulate_args {
  uint64_t struct_bytes;
  const double *base_duration_ns;  /* [tasks] */
  const double *base_start_ns;     /* [steps * tasks] */
  const double *base_end_ns;       /* [steps * tasks] */
  const double *base_block_end_ns; /* [steps * blocks] */
  int64_t edits;
  const int32_t *edit_task;        /* [edits], each task at most once */
  const double *edit_duration_ns;  /* [edits] */
  int32_t exact_shift;             /* non-zero: all sums are exact, so a shift may be copied */
  int32_t reserved;
  int64_t slots;                   /* room in out_slot_*; more blocks to recompute: TOO_MUCH */
  int32_t *out_slot;               /* [steps * blocks]: slot of a recomputed block, or -1 */
  double *out_delta_ns;            /* [steps * blocks]: shift of a block that was not */
  double *out_slot_start_ns;       /* [slots * block_tasks] */
  double *out_slot_end_ns;         /* [slots * block_tasks] */
  double *out_step_end_ns;         /* [steps] */
  int64_t out_recomputed_tasks;
} slipstream_resimulate_args;

SLIPSTREAM_API int32_t slipstream_resimulate(const slipstream_plan *plan,
                                             slipstream_resimulate_args *args,
                                             slipstream_error *error);

/* Writes the whole timeline that slipstream_resimulate left in blocks. `base_ns` and
 * `slot_ns` are both starts or both ends. */
SLIPSTREAM_API void slipstream_materialise(const slipstream_plan *plan, const double *base_ns,
                                           const int32_t *slot, const double *delta_ns,
                                           const double *slot_ns, double *out_ns);

#ifdef __cplusplus
}
#endif
#endif
