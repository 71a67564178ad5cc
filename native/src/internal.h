// What the engine's files share: the compiled program and how errors are reported.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <vector>

#include "slipstream/engine.h"

namespace slipstream {

// Compressed rows: row r holds items[offset[r] .. offset[r + 1]).
struct Rows {
  std::vector<int32_t> offset;
  std::vector<int32_t> item;
  std::vector<double> delay;  // empty when every delay is zero

  bool empty() const { return item.empty(); }
};

// Rows that carry their length in front: at `begin[r]` the count, then the items. One cache line
// holds both, and a reader needs one number to find a row.
struct PrefixedRows {
  std::vector<int32_t> begin;
  std::vector<int32_t> item;
  std::vector<double> delay;  // parallel to item; empty when every delay is zero
};

struct Needs {
  std::vector<int64_t> offset;  // [tasks + 1], empty when no task needs anything
  std::vector<int32_t> resource;
  std::vector<int64_t> amount;
};

struct Flows {
  std::vector<double> capacity;  // [links]
  std::vector<double> bytes;     // [tasks], empty when nothing is transferred
  std::vector<double> weight;    // [tasks], empty when all are 1
  std::vector<int64_t> offset;   // [tasks + 1]
  std::vector<int32_t> link;
  std::vector<int32_t> parent;   // parallel to link; empty without trees

  bool empty() const { return bytes.empty(); }
  bool tree(int32_t task) const { return !parent.empty() && parent[offset[task]] > -2; }
};

// How transfers travel as packets; see packets.h.
struct PacketModel {
  std::vector<double> latency_ns;  // [links]
  std::vector<double> queue_bytes;
  std::vector<double> mark_bytes;
  double payload_bytes = 0.0;
  double header_bytes = 0.0;
  double first_window = 0.0;  // packets
  double max_window = 0.0;
  double timeout_ns = 0.0;

  bool empty() const { return latency_ns.empty(); }
};

// The caller's struct, read no further than the caller wrote it.
template <typename Struct>
Struct read_struct(const Struct *given) {
  Struct known;
  std::memset(&known, 0, sizeof known);
  const uint64_t bytes = given->struct_bytes < sizeof known ? given->struct_bytes : sizeof known;
  std::memcpy(&known, given, static_cast<std::size_t>(bytes));
  return known;
}

inline int fail(slipstream_error *error, int status, int64_t element, const char *message) {
  if (error != nullptr) {
    error->element = element;
    std::snprintf(error->message, sizeof error->message, "%s", message);
  }
  return status;
}

// Runs `body`, which may run out of memory, behind the C ABI.
template <typename Body>
int guarded(slipstream_error *error, Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc &) {
    return fail(error, SLIPSTREAM_NO_MEMORY, -1, "out of memory");
  } catch (...) {
    return fail(error, SLIPSTREAM_STUCK, -1, "unexpected exception");
  }
}

}  // namespace slipstream

// A compiled program. Everything is in *position* order, a topological order as close to the
// order of task ids as the dependencies allow, unless its name says `_by_id`.
struct slipstream_program {
  int32_t tasks = 0;
  int32_t lanes = 0;
  int64_t steps = 1;

  bool all_fixed = true;
  std::vector<uint8_t> policy;      // [lanes]
  std::vector<double> quantum_ns;   // [lanes], empty when all zero
  std::vector<int32_t> lane_by_id;  // [tasks]
  std::vector<double> gap_by_id;    // [tasks], empty when all zero
  std::vector<int32_t> priority_by_id;  // [tasks], empty when all zero

  // The fixed-order pass.
  std::vector<int32_t> order;     // position -> id; empty when the identity
  std::vector<int32_t> position;  // id -> position; empty when the identity
  std::vector<int32_t> lane;      // [tasks]
  std::vector<double> gap_ns;     // [tasks], empty when all zero
  slipstream::Rows preds;         // positions, edges within a step
  slipstream::Rows lagged_preds;  // positions, edges from the step before

  // The event loop.
  slipstream::PrefixedRows succs_by_id;  // edges within a step
  slipstream::Rows lagged_succs_by_id;  // edges to the next step
  std::vector<int32_t> lane_task_offset;  // [lanes + 1]
  std::vector<int32_t> lane_tasks_by_id;  // ids of each lane, ascending
  std::vector<int64_t> capacity;          // [resources]
  slipstream::Needs needs;
  slipstream::Flows flows;
  slipstream::PacketModel packets;  // empty: transfers are fluids

  bool fixed_order() const { return all_fixed && needs.offset.empty() && flows.empty(); }
};

namespace slipstream {

void simulate_fixed_order(const slipstream_program &program, const slipstream_simulate_args &args);
int simulate_events(const slipstream_program &program, slipstream_simulate_args &args,
                    slipstream_error *error);

}  // namespace slipstream
