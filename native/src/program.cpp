// From a caller's arrays to a compiled program: checks, compressed rows, topological order.

#include <algorithm>
#include <cmath>
#include <memory>

#include "internal.h"

namespace slipstream {
namespace {

constexpr int64_t kMaxIndex = INT32_MAX;

bool any_nonzero(const double *values, int64_t count) {
  if (values == nullptr) return false;
  for (int64_t i = 0; i < count; ++i)
    if (values[i] != 0.0) return true;
  return false;
}

int check_flows(const slipstream_program_input &in, slipstream_error *error) {
  if (in.links < 0 || in.links > kMaxIndex) return fail(error, SLIPSTREAM_INVALID, -1, "links");
  if (in.flow_bytes == nullptr) return SLIPSTREAM_OK;
  if (in.path_offset == nullptr || in.path_offset[0] != 0)
    return fail(error, SLIPSTREAM_INVALID, 0, "path_offset");
  std::vector<int64_t> seen(static_cast<std::size_t>(in.links), -1);
  for (int64_t t = 0; t < in.tasks; ++t) {
    if (in.path_offset[t + 1] < in.path_offset[t])
      return fail(error, SLIPSTREAM_INVALID, t, "path_offset");
    const double bytes = in.flow_bytes[t];
    if (!(bytes >= 0.0 && std::isfinite(bytes)))
      return fail(error, SLIPSTREAM_INVALID, t, "bytes of a task");
    const bool moves = bytes > 0.0;
    if (moves && in.path_offset[t + 1] == in.path_offset[t])
      return fail(error, SLIPSTREAM_INVALID, t, "a transfer without a path");
    if (moves && in.policy[in.lane[t]] == SLIPSTREAM_PREEMPTIVE)
      return fail(error, SLIPSTREAM_INVALID, t, "a transfer on a preemptive lane");
    if (moves && in.flow_weight != nullptr &&
        !(in.flow_weight[t] > 0.0 && std::isfinite(in.flow_weight[t])))
      return fail(error, SLIPSTREAM_INVALID, t, "weight of a transfer");
    for (int64_t i = in.path_offset[t]; i < in.path_offset[t + 1]; ++i) {
      const int32_t l = in.path_link[i];
      if (l < 0 || l >= in.links)
        return fail(error, SLIPSTREAM_INVALID, t, "link of a path out of range");
      if (seen[l] == t) return fail(error, SLIPSTREAM_INVALID, t, "a link twice on one path");
      seen[l] = t;
      if (moves && !(in.link_capacity[l] > 0.0 && std::isfinite(in.link_capacity[l])))
        return fail(error, SLIPSTREAM_INVALID, t, "a link without capacity on a path");
    }
  }
  return SLIPSTREAM_OK;
}

int check_trees(const slipstream_program_input &in, slipstream_error *error) {
  if (in.flow_bytes == nullptr || in.tree_parent == nullptr) return SLIPSTREAM_OK;
  for (int64_t t = 0; t < in.tasks; ++t) {
    const int64_t first = in.path_offset[t], hops = in.path_offset[t + 1] - first;
    const bool tree = hops > 0 && in.tree_parent[first] != -2;
    if (tree && (hops % 2 != 0 || in.link_latency_ns == nullptr))
      return fail(error, SLIPSTREAM_INVALID, t, "a tree without links back, or of fluids");
    for (int64_t h = 0; h < hops; ++h) {
      const int64_t parent = in.tree_parent[first + h];
      const bool up = tree && 2 * h < hops;
      if (up ? parent != -1 && !(parent > h && 2 * parent < hops) : parent != -2)
        return fail(error, SLIPSTREAM_INVALID, t, "parent of a link in a tree");
    }
  }
  return SLIPSTREAM_OK;
}

int check_packets(const slipstream_program_input &in, slipstream_error *error) {
  if (in.flow_bytes == nullptr || in.link_latency_ns == nullptr) return SLIPSTREAM_OK;
  if (!(in.payload_bytes > 0.0 && in.header_bytes >= 0.0 && in.timeout_ns > 0.0 &&
        in.first_window >= 1.0 && in.max_window >= 1.0))
    return fail(error, SLIPSTREAM_INVALID, -1, "model of packets");
  for (int64_t l = 0; l < in.links; ++l)
    if (!(in.link_latency_ns[l] >= 0.0 && in.link_queue_bytes[l] >= 0.0 &&
          in.link_mark_bytes[l] >= 0.0))
      return fail(error, SLIPSTREAM_INVALID, l, "latency or queue of a link");
  for (int64_t t = 0; t < in.tasks; ++t)
    if (in.flow_bytes[t] / in.payload_bytes > kMaxIndex / 2)
      return fail(error, SLIPSTREAM_INVALID, t, "more packets than can be counted");
  return SLIPSTREAM_OK;
}

int check(const slipstream_program_input &in, slipstream_error *error) {
  if (in.tasks < 0 || in.tasks > kMaxIndex) return fail(error, SLIPSTREAM_INVALID, -1, "tasks");
  if (in.lanes < 0 || in.lanes > kMaxIndex) return fail(error, SLIPSTREAM_INVALID, -1, "lanes");
  // Lists of successors have one length per task in addition to the edges.
  if (in.edges < 0 || in.edges > kMaxIndex - in.tasks)
    return fail(error, SLIPSTREAM_INVALID, -1, "tasks + edges");
  if (in.resources < 0 || in.resources > kMaxIndex)
    return fail(error, SLIPSTREAM_INVALID, -1, "resources");
  if (in.steps < 1 || in.steps > kMaxIndex || in.steps * std::max<int64_t>(in.tasks, 1) > kMaxIndex)
    return fail(error, SLIPSTREAM_INVALID, -1, "steps * tasks");
  for (int64_t t = 0; t < in.tasks; ++t) {
    if (in.lane[t] < 0 || in.lane[t] >= in.lanes)
      return fail(error, SLIPSTREAM_INVALID, t, "lane of a task out of range");
    if (in.gap_ns != nullptr && !(in.gap_ns[t] >= 0.0))
      return fail(error, SLIPSTREAM_INVALID, t, "gap of a task is negative or not a number");
    if (in.policy[in.lane[t]] != SLIPSTREAM_CONCURRENT) continue;
    const bool needs = in.need_offset != nullptr && in.need_offset[t + 1] > in.need_offset[t];
    if (needs || (in.gap_ns != nullptr && in.gap_ns[t] > 0.0))
      return fail(error, SLIPSTREAM_INVALID, t, "a gap or a resource on a concurrent lane");
  }
  for (int64_t l = 0; l < in.lanes; ++l) {
    if (in.policy[l] > SLIPSTREAM_CONCURRENT)
      return fail(error, SLIPSTREAM_INVALID, l, "policy of a lane unknown");
    if (in.quantum_ns != nullptr && !(in.quantum_ns[l] >= 0.0))
      return fail(error, SLIPSTREAM_INVALID, l, "quantum of a lane is negative or not a number");
  }
  for (int64_t e = 0; e < in.edges; ++e) {
    if (in.edge_src[e] < 0 || in.edge_src[e] >= in.tasks || in.edge_dst[e] < 0 ||
        in.edge_dst[e] >= in.tasks)
      return fail(error, SLIPSTREAM_INVALID, e, "end of an edge out of range");
    if (in.edge_delay_ns != nullptr && !(in.edge_delay_ns[e] >= 0.0))
      return fail(error, SLIPSTREAM_INVALID, e, "delay of an edge is negative or not a number");
    if (in.edge_lag != nullptr && in.edge_lag[e] > 1)
      return fail(error, SLIPSTREAM_INVALID, e, "lag of an edge is neither 0 nor 1");
  }
  if (const int status = check_flows(in, error)) return status;
  if (const int status = check_packets(in, error)) return status;
  if (const int status = check_trees(in, error)) return status;
  if (in.need_offset == nullptr) return SLIPSTREAM_OK;
  if (in.need_offset[0] != 0) return fail(error, SLIPSTREAM_INVALID, 0, "need_offset");
  for (int64_t t = 0; t < in.tasks; ++t) {
    if (in.need_offset[t + 1] < in.need_offset[t])
      return fail(error, SLIPSTREAM_INVALID, t, "need_offset");
    for (int64_t i = in.need_offset[t]; i < in.need_offset[t + 1]; ++i) {
      const int32_t r = in.need_resource[i];
      if (r < 0 || r >= in.resources)
        return fail(error, SLIPSTREAM_INVALID, t, "resource of a task out of range");
      if (in.need_amount[i] <= 0 || in.need_amount[i] > in.capacity[r])
        return fail(error, SLIPSTREAM_INVALID, t, "amount a task needs exceeds the capacity");
    }
  }
  return SLIPSTREAM_OK;
}

// Rows of `row[e]` holding `item[e]` for the edges with this lag, by counting sort: O(edges).
Rows make_rows(const slipstream_program_input &in, const int32_t *row, const int32_t *item,
               uint8_t lag, bool with_delay) {
  Rows rows;
  rows.offset.assign(static_cast<std::size_t>(in.tasks) + 1, 0);
  int64_t count = 0;
  for (int64_t e = 0; e < in.edges; ++e) {
    if ((in.edge_lag == nullptr ? 0 : in.edge_lag[e]) != lag) continue;
    ++rows.offset[static_cast<std::size_t>(row[e]) + 1];
    ++count;
  }
  for (int64_t t = 0; t < in.tasks; ++t) rows.offset[t + 1] += rows.offset[t];
  rows.item.resize(static_cast<std::size_t>(count));
  if (with_delay) rows.delay.resize(static_cast<std::size_t>(count));
  std::vector<int32_t> next(rows.offset.begin(), rows.offset.end() - 1);
  for (int64_t e = 0; e < in.edges; ++e) {
    if ((in.edge_lag == nullptr ? 0 : in.edge_lag[e]) != lag) continue;
    const int32_t slot = next[row[e]]++;
    rows.item[slot] = item[e];
    if (with_delay) rows.delay[slot] = in.edge_delay_ns[e];
  }
  return rows;
}

PrefixedRows prefix_lengths(const Rows &rows) {
  PrefixedRows out;
  const std::size_t count = rows.offset.size() - 1;
  out.begin.reserve(count);
  out.item.reserve(count + rows.item.size());
  if (!rows.delay.empty()) out.delay.reserve(count + rows.item.size());
  for (std::size_t r = 0; r < count; ++r) {
    out.begin.push_back(static_cast<int32_t>(out.item.size()));
    out.item.push_back(rows.offset[r + 1] - rows.offset[r]);
    if (!rows.delay.empty()) out.delay.push_back(0.0);
    for (int32_t e = rows.offset[r]; e < rows.offset[r + 1]; ++e) {
      out.item.push_back(rows.item[e]);
      if (!rows.delay.empty()) out.delay.push_back(rows.delay[e]);
    }
  }
  return out;
}

// The task before each in its lane where the lane has a fixed order, else -1.
std::vector<int32_t> fixed_predecessors(const slipstream_program &program) {
  std::vector<int32_t> before(static_cast<std::size_t>(program.tasks), -1);
  std::vector<int32_t> last(static_cast<std::size_t>(program.lanes), -1);
  for (int32_t t = 0; t < program.tasks; ++t) {
    const int32_t lane = program.lane_by_id[t];
    if (program.policy[lane] != SLIPSTREAM_FIXED) continue;
    before[t] = last[lane];
    last[lane] = t;
  }
  return before;
}

int report_cycle(const std::vector<int32_t> &stack, int32_t closing, slipstream_error *error) {
  if (error != nullptr) {
    const auto first = std::find(stack.begin(), stack.end(), closing);
    error->cycle_length = stack.end() - first;
    // The stack goes from a task to what it waits for; a cycle reads better the other way.
    for (int64_t i = 0; i < error->cycle_length && i < error->cycle_capacity; ++i)
      if (error->cycle != nullptr) error->cycle[i] = stack[stack.size() - 1 - i];
  }
  return fail(error, SLIPSTREAM_CYCLE, closing, "dependencies form a cycle");
}

// Depth-first over predecessors, visiting ids in order: a topological order that stays close to
// the order of ids, hence to the order in memory. Leaves `order` empty when it is the identity.
int topological_order(const slipstream_program &program, const Rows &preds,
                      std::vector<int32_t> &order, slipstream_error *error) {
  const std::vector<int32_t> before = fixed_predecessors(program);
  bool forward = true;
  for (int32_t t = 0; t < program.tasks && forward; ++t)
    for (int32_t e = preds.offset[t]; e < preds.offset[t + 1]; ++e)
      if (preds.item[e] >= t) {
        forward = false;
        break;
      }
  if (forward) return SLIPSTREAM_OK;

  enum : uint8_t { kNew, kOpen, kDone };
  std::vector<uint8_t> state(static_cast<std::size_t>(program.tasks), kNew);
  std::vector<int32_t> cursor(preds.offset.begin(), preds.offset.end() - 1);
  std::vector<int32_t> stack;
  order.reserve(static_cast<std::size_t>(program.tasks));
  for (int32_t root = 0; root < program.tasks; ++root) {
    if (state[root] != kNew) continue;
    stack.push_back(root);
    state[root] = kOpen;
    while (!stack.empty()) {
      const int32_t t = stack.back();
      int32_t next = -1;
      if (before[t] >= 0 && state[before[t]] != kDone) {
        next = before[t];
      } else {
        while (cursor[t] < preds.offset[t + 1] && state[preds.item[cursor[t]]] == kDone)
          ++cursor[t];
        if (cursor[t] < preds.offset[t + 1]) next = preds.item[cursor[t]];
      }
      if (next < 0) {
        state[t] = kDone;
        order.push_back(t);
        stack.pop_back();
      } else if (state[next] == kOpen) {
        return report_cycle(stack, next, error);
      } else {
        state[next] = kOpen;
        stack.push_back(next);
      }
    }
  }
  return SLIPSTREAM_OK;
}

Rows renumber(const Rows &by_id, const std::vector<int32_t> &order,
              const std::vector<int32_t> &position) {
  Rows rows;
  rows.offset.reserve(by_id.offset.size());
  rows.item.reserve(by_id.item.size());
  rows.delay.reserve(by_id.delay.size());
  rows.offset.push_back(0);
  for (const int32_t t : order) {
    for (int32_t e = by_id.offset[t]; e < by_id.offset[t + 1]; ++e) {
      rows.item.push_back(position[by_id.item[e]]);
      if (!by_id.delay.empty()) rows.delay.push_back(by_id.delay[e]);
    }
    rows.offset.push_back(static_cast<int32_t>(rows.item.size()));
  }
  return rows;
}

void put_in_position_order(slipstream_program &program) {
  program.lane = program.lane_by_id;
  program.gap_ns = program.gap_by_id;
  if (program.order.empty()) return;
  program.position.resize(program.order.size());
  for (std::size_t p = 0; p < program.order.size(); ++p) {
    const int32_t t = program.order[p];
    program.position[t] = static_cast<int32_t>(p);
    program.lane[p] = program.lane_by_id[t];
    if (!program.gap_ns.empty()) program.gap_ns[p] = program.gap_by_id[t];
  }
  program.preds = renumber(program.preds, program.order, program.position);
  program.lagged_preds = renumber(program.lagged_preds, program.order, program.position);
}

void list_lane_tasks(slipstream_program &program) {
  program.lane_task_offset.assign(static_cast<std::size_t>(program.lanes) + 1, 0);
  for (const int32_t lane : program.lane_by_id) ++program.lane_task_offset[lane + 1];
  for (int32_t l = 0; l < program.lanes; ++l)
    program.lane_task_offset[l + 1] += program.lane_task_offset[l];
  program.lane_tasks_by_id.resize(static_cast<std::size_t>(program.tasks));
  std::vector<int32_t> next(program.lane_task_offset.begin(), program.lane_task_offset.end() - 1);
  for (int32_t t = 0; t < program.tasks; ++t)
    program.lane_tasks_by_id[next[program.lane_by_id[t]]++] = t;
}

void copy_needs(const slipstream_program_input &in, slipstream_program &program) {
  program.capacity.assign(in.capacity, in.capacity + in.resources);
  if (in.need_offset == nullptr || in.need_offset[in.tasks] == 0) return;
  const int64_t count = in.need_offset[in.tasks];
  program.needs.offset.assign(in.need_offset, in.need_offset + in.tasks + 1);
  program.needs.resource.assign(in.need_resource, in.need_resource + count);
  program.needs.amount.assign(in.need_amount, in.need_amount + count);
}

void copy_packets(const slipstream_program_input &in, PacketModel &model) {
  model.latency_ns.assign(in.link_latency_ns, in.link_latency_ns + in.links);
  model.queue_bytes.assign(in.link_queue_bytes, in.link_queue_bytes + in.links);
  model.mark_bytes.assign(in.link_mark_bytes, in.link_mark_bytes + in.links);
  model.payload_bytes = in.payload_bytes;
  model.header_bytes = in.header_bytes;
  model.first_window = in.first_window;
  model.max_window = in.max_window;
  model.timeout_ns = in.timeout_ns;
}

void copy_flows(const slipstream_program_input &in, slipstream_program &program) {
  if (!any_nonzero(in.flow_bytes, in.tasks)) return;
  program.flows.capacity.assign(in.link_capacity, in.link_capacity + in.links);
  program.flows.bytes.assign(in.flow_bytes, in.flow_bytes + in.tasks);
  if (in.flow_weight != nullptr)
    program.flows.weight.assign(in.flow_weight, in.flow_weight + in.tasks);
  program.flows.offset.assign(in.path_offset, in.path_offset + in.tasks + 1);
  program.flows.link.assign(in.path_link, in.path_link + in.path_offset[in.tasks]);
  if (in.tree_parent != nullptr)
    program.flows.parent.assign(in.tree_parent, in.tree_parent + in.path_offset[in.tasks]);
  if (in.link_latency_ns != nullptr) copy_packets(in, program.packets);
}

int compile(const slipstream_program_input &in, slipstream_program **out,
            slipstream_error *error) {
  if (const int status = check(in, error)) return status;
  auto program = std::make_unique<slipstream_program>();
  program->tasks = static_cast<int32_t>(in.tasks);
  program->lanes = static_cast<int32_t>(in.lanes);
  program->steps = in.steps;
  program->policy.assign(in.policy, in.policy + in.lanes);
  for (const uint8_t policy : program->policy)
    program->all_fixed = program->all_fixed && policy == SLIPSTREAM_FIXED;
  program->lane_by_id.assign(in.lane, in.lane + in.tasks);
  if (any_nonzero(in.gap_ns, in.tasks)) program->gap_by_id.assign(in.gap_ns, in.gap_ns + in.tasks);
  if (any_nonzero(in.quantum_ns, in.lanes))
    program->quantum_ns.assign(in.quantum_ns, in.quantum_ns + in.lanes);
  if (in.priority != nullptr)
    program->priority_by_id.assign(in.priority, in.priority + in.tasks);

  const bool delay = any_nonzero(in.edge_delay_ns, in.edges);
  program->preds = make_rows(in, in.edge_dst, in.edge_src, 0, delay);
  program->lagged_preds = make_rows(in, in.edge_dst, in.edge_src, 1, delay);
  if (const int status = topological_order(*program, program->preds, program->order, error))
    return status;
  put_in_position_order(*program);

  program->succs_by_id = prefix_lengths(make_rows(in, in.edge_src, in.edge_dst, 0, delay));
  program->lagged_succs_by_id = make_rows(in, in.edge_src, in.edge_dst, 1, delay);
  list_lane_tasks(*program);
  copy_needs(in, *program);
  copy_flows(in, *program);
  *out = program.release();
  return SLIPSTREAM_OK;
}

}  // namespace
}  // namespace slipstream

extern "C" {

int32_t slipstream_engine_abi(void) { return SLIPSTREAM_ENGINE_ABI; }

int32_t slipstream_program_compile(const slipstream_program_input *input,
                                   slipstream_program **out_program, slipstream_error *error) {
  return slipstream::guarded(error, [&] {
    return slipstream::compile(slipstream::read_struct(input), out_program, error);
  });
}

void slipstream_program_free(slipstream_program *program) { delete program; }

int32_t slipstream_program_is_fixed_order(const slipstream_program *program) {
  return program->fixed_order() ? 1 : 0;
}

int32_t slipstream_simulate(const slipstream_program *program, slipstream_simulate_args *args,
                            slipstream_error *error) {
  return slipstream::guarded(error, [&]() -> int {
    slipstream_simulate_args known = slipstream::read_struct(args);
    if (program->fixed_order() && known.force_event_loop == 0) {
      slipstream::simulate_fixed_order(*program, known);
      return SLIPSTREAM_OK;
    }
    const int status = slipstream::simulate_events(*program, known, error);
    if (known.changes_capacity > 0) args->out_changes = known.out_changes;
    return status;
  });
}

}  // extern "C"
