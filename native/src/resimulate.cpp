// Re-simulation of a fixed-order program after a few durations changed.
//
// The timeline is cut into blocks of consecutive positions. A block without an edit, all of whose
// predecessor blocks moved by one and the same delta, moves by that delta as a whole: it costs a
// look at its predecessors instead of a pass over its tasks. Any other block is recomputed; where
// all its tasks turn out to have moved alike, it is again one delta. Edits therefore cost the
// blocks they lie in plus those in which their effects still differ between lanes.
//
// (a + delta) + d equals (a + d) + delta to the bit only while every sum is exact, which the
// caller vouches for with `exact_shift` (all times multiples of 2^-10 ns, no sum above 2^43 ns).
// Without it, blocks are only skipped while their delta is zero.

#include <algorithm>
#include <memory>

#include "internal.h"

namespace {
constexpr int32_t kBlockTasks = 256;

// Positions are not negative; unsigned division by a power of two is one shift.
inline int32_t block_of(int32_t position) {
  return static_cast<int32_t>(static_cast<uint32_t>(position) / kBlockTasks);
}
inline int32_t place_in_block(int32_t position) {
  return static_cast<int32_t>(static_cast<uint32_t>(position) % kBlockTasks);
}
}

struct slipstream_plan {
  const slipstream_program *program = nullptr;
  int32_t blocks = 0;
  std::vector<int32_t> lane_before;  // [tasks]: position before this one in its lane, or -1
  std::vector<int32_t> lane_last;    // [lanes]: last position of each lane, or -1
  // Blocks a block depends on, itself left out: in its own step, and in the step before.
  std::vector<int64_t> offset, lagged_offset;
  std::vector<int32_t> block, lagged_block;
};

namespace slipstream {
namespace {

// Collects the distinct values added since the last `close`.
class RowBuilder {
 public:
  RowBuilder(int32_t values, std::vector<int64_t> &offset, std::vector<int32_t> &items)
      : seen_(static_cast<std::size_t>(values), -1), offset_(offset), items_(items) {
    offset_.push_back(0);
  }
  void add(int32_t value) {
    if (seen_[value] == row_) return;
    seen_[value] = row_;
    items_.push_back(value);
  }
  void close() {
    offset_.push_back(static_cast<int64_t>(items_.size()));
    ++row_;
  }

 private:
  std::vector<int32_t> seen_;
  int32_t row_ = 0;
  std::vector<int64_t> &offset_;
  std::vector<int32_t> &items_;
};

std::unique_ptr<slipstream_plan> make_plan(const slipstream_program &program) {
  auto plan = std::make_unique<slipstream_plan>();
  plan->program = &program;
  plan->blocks = program.tasks / kBlockTasks + (program.tasks % kBlockTasks != 0);
  plan->lane_last.assign(static_cast<std::size_t>(program.lanes), -1);
  plan->lane_before.resize(static_cast<std::size_t>(program.tasks));
  for (int32_t p = 0; p < program.tasks; ++p) {
    plan->lane_before[p] = plan->lane_last[program.lane[p]];
    plan->lane_last[program.lane[p]] = p;
  }
  RowBuilder within(plan->blocks, plan->offset, plan->block);
  RowBuilder lagged(plan->blocks, plan->lagged_offset, plan->lagged_block);
  for (int32_t b = 0; b < plan->blocks; ++b) {
    const int32_t first = b * kBlockTasks;
    const int32_t last = std::min<int64_t>(int64_t{first} + kBlockTasks, program.tasks);
    for (int32_t p = first; p < last; ++p) {
      const int32_t before = plan->lane_before[p];
      if (before < 0)
        lagged.add(block_of(plan->lane_last[program.lane[p]]));
      else if (before < first)
        within.add(block_of(before));
      for (int32_t e = program.preds.offset[p]; e < program.preds.offset[p + 1]; ++e)
        if (program.preds.item[e] < first) within.add(block_of(program.preds.item[e]));
      for (int32_t e = program.lagged_preds.offset[p]; e < program.lagged_preds.offset[p + 1]; ++e)
        lagged.add(block_of(program.lagged_preds.item[e]));
    }
    within.close();
    lagged.close();
  }
  return plan;
}

struct Edit {
  int32_t position;
  double duration_ns;
};

class Resimulation {
 public:
  Resimulation(const slipstream_plan &plan, slipstream_resimulate_args &args)
      : plan_(plan), program_(*plan.program), args_(args) {
    edits_.resize(static_cast<std::size_t>(args.edits));
    int32_t before = -1;
    for (int64_t i = 0; i < args.edits; ++i) {
      const int32_t task = args.edit_task[i];
      const int32_t position = program_.position.empty() ? task : program_.position[task];
      edits_[i] = {position, args.edit_duration_ns[i]};
      sorted_ = sorted_ && position > before;
      edited_runs_ += before < 0 || block_of(position) != block_of(before);
      before = position;
    }
  }

  bool run() {
    if (edited_blocks() * program_.steps > args_.slots) return false;
    if (!sorted_)
      std::sort(edits_.begin(), edits_.end(),
                [](const Edit &a, const Edit &b) { return a.position < b.position; });
    for (int64_t k = 0; k < program_.steps; ++k) {
      std::size_t next_edit = 0;
      double step_end = 0.0;
      for (int32_t b = 0; b < plan_.blocks; ++b) {
        const std::size_t first_edit = next_edit;
        while (next_edit < edits_.size() && block_of(edits_[next_edit].position) == b)
          ++next_edit;
        double delta = 0.0;
        double block_end;
        const int64_t cell = k * plan_.blocks + b;
        if (first_edit == next_edit && shifts_as_one(k, b, delta)) {
          args_.out_slot[cell] = -1;
          args_.out_delta_ns[cell] = delta;
          block_end = args_.base_block_end_ns[cell] + delta;
        } else {
          if (recomputed_blocks_++ == args_.slots) return false;
          block_end = recompute(k, b, first_edit, next_edit);
        }
        step_end = std::max(step_end, block_end);
      }
      args_.out_step_end_ns[k] = step_end;
    }
    return true;
  }

 private:
  int64_t edited_blocks() const {
    if (sorted_) return edited_runs_;
    std::vector<bool> edited(static_cast<std::size_t>(plan_.blocks), false);
    int64_t count = 0;
    for (const Edit &edit : edits_) {
      if (edited[block_of(edit.position)]) continue;
      edited[block_of(edit.position)] = true;
      ++count;
    }
    return count;
  }

  bool agrees(int64_t cell, bool &known, double &delta) const {
    if (args_.out_slot[cell] >= 0) return false;
    if (known) return args_.out_delta_ns[cell] == delta;
    delta = args_.out_delta_ns[cell];
    known = true;
    return delta == 0.0 || args_.exact_shift != 0;
  }

  // A lane or task that nothing gates in the first step starts at zero whatever was edited, so
  // blocks of step 0 that hold one are anchored: they have a predecessor that never moves.
  bool shifts_as_one(int64_t k, int32_t b, double &delta) const {
    bool known = false;
    const int64_t row = k * plan_.blocks;
    if (k == 0 && plan_.lagged_offset[b] < plan_.lagged_offset[b + 1]) known = true;
    for (int64_t i = plan_.offset[b]; i < plan_.offset[b + 1]; ++i)
      if (!agrees(row + plan_.block[i], known, delta)) return false;
    if (k == 0) return true;
    for (int64_t i = plan_.lagged_offset[b]; i < plan_.lagged_offset[b + 1]; ++i)
      if (!agrees(row - plan_.blocks + plan_.lagged_block[i], known, delta)) return false;
    return true;
  }

  // Whether a predecessor lies in a recomputed block cannot be predicted, so its address is
  // chosen and its value is not: the shift of a recomputed block is zero.
  double end_of(int64_t k, int32_t position) const {
    const int64_t cell = k * plan_.blocks + block_of(position);
    const int64_t slot = args_.out_slot[cell];
    const int32_t task = program_.order.empty() ? position : program_.order[position];
    const double *base = args_.base_end_ns + (k * program_.tasks + task);
    const double *recomputed =
        args_.out_slot_end_ns + (std::max<int64_t>(slot, 0) * kBlockTasks + place_in_block(position));
    return *(slot >= 0 ? recomputed : base) + args_.out_delta_ns[cell];
  }

  // Ends of the block before `b` in step `k`, for a window over it and `b`.
  void ends_before(int64_t k, int32_t b, double *out) const {
    if (b == 0) return;
    const int64_t cell = k * plan_.blocks + b - 1;
    if (args_.out_slot[cell] >= 0) {
      std::copy_n(args_.out_slot_end_ns + int64_t{args_.out_slot[cell]} * kBlockTasks, kBlockTasks,
                  out);
      return;
    }
    const double *base = args_.base_end_ns + k * program_.tasks;
    const double delta = args_.out_delta_ns[cell];
    const int32_t first = (b - 1) * kBlockTasks;
    for (int32_t i = 0; i < kBlockTasks; ++i)
      out[i] = base[program_.order.empty() ? first + i : program_.order[first + i]] + delta;
  }

  // Most of what a task waits for ended shortly before; what did not is looked up block by block.
  struct Window {
    int32_t first;  // position of ends[0]; negative for the first block
    double ends[2 * kBlockTasks];
  };

  template <class EndOf>
  static double ready_after(const Rows &preds, int32_t p, double ready, const EndOf &end_of) {
    for (int32_t e = preds.offset[p]; e < preds.offset[p + 1]; ++e) {
      double at = end_of(preds.item[e]);
      if (!preds.delay.empty()) at += preds.delay[e];
      ready = at > ready ? at : ready;
    }
    return ready;
  }

  double recompute(int64_t k, int32_t b, std::size_t edit, std::size_t last_edit) {
    const int64_t cell = k * plan_.blocks + b;
    const int32_t first = b * kBlockTasks;
    const int32_t last = std::min<int64_t>(int64_t{first} + kBlockTasks, program_.tasks);
    double *starts = args_.out_slot_start_ns + used_slots_ * kBlockTasks;
    Window window;
    window.first = first - kBlockTasks;
    ends_before(k, b, window.ends);
    double *ends = window.ends + kBlockTasks;
    const auto end_now = [&](int32_t position) {
      return position >= window.first ? window.ends[position - window.first] : end_of(k, position);
    };
    const auto end_of_last_step = [&](int32_t position) { return end_of(k - 1, position); };
    args_.out_slot[cell] = static_cast<int32_t>(used_slots_);
    args_.out_delta_ns[cell] = 0.0;
    double block_end = 0.0;
    bool alike = true;
    double delta = 0.0;
    for (int32_t p = first; p < last; ++p) {
      const int32_t task = program_.order.empty() ? p : program_.order[p];
      double duration = args_.base_duration_ns[task];
      const bool edited = edit < last_edit && edits_[edit].position == p;
      if (edited) duration = edits_[edit++].duration_ns;

      double start = 0.0;
      const int32_t before = plan_.lane_before[p];
      if (before >= 0)
        start = end_now(before) + gap_of(before);
      else if (k > 0)
        start = end_of(k - 1, plan_.lane_last[program_.lane[p]]) +
                gap_of(plan_.lane_last[program_.lane[p]]);
      start = ready_after(program_.preds, p, start, end_now);
      if (k > 0) start = ready_after(program_.lagged_preds, p, start, end_of_last_step);
      const double end = start + duration;
      starts[p - first] = start;
      ends[p - first] = end;
      block_end = std::max(block_end, end);

      const int64_t at = k * program_.tasks + task;
      if (p == first) delta = end - args_.base_end_ns[at];
      // Sums, not differences: they are what materialising computes.
      alike = alike && args_.base_end_ns[at] + delta == end &&
              args_.base_start_ns[at] + delta == start;
    }
    args_.out_recomputed_tasks += last - first;
    if (alike && (delta == 0.0 || args_.exact_shift != 0)) {
      args_.out_slot[cell] = -1;
      args_.out_delta_ns[cell] = delta;
    } else {
      std::copy_n(ends, last - first, args_.out_slot_end_ns + used_slots_ * kBlockTasks);
      ++used_slots_;
    }
    return block_end;
  }

  double gap_of(int32_t position) const {
    return program_.gap_ns.empty() ? 0.0 : program_.gap_ns[position];
  }

  const slipstream_plan &plan_;
  const slipstream_program &program_;
  slipstream_resimulate_args &args_;
  std::vector<Edit> edits_;
  bool sorted_ = true;
  int64_t edited_runs_ = 0;  // stretches of edits in one block, in the order given
  int64_t recomputed_blocks_ = 0;
  int64_t used_slots_ = 0;  // never more than recomputed_blocks_
};

}  // namespace
}  // namespace slipstream

extern "C" {

int32_t slipstream_plan_create(const slipstream_program *program, slipstream_plan **out_plan,
                               slipstream_error *error) {
  return slipstream::guarded(error, [&]() -> int {
    if (!program->fixed_order())
      return slipstream::fail(error, SLIPSTREAM_INVALID, -1, "not a fixed-order program");
    *out_plan = slipstream::make_plan(*program).release();
    return SLIPSTREAM_OK;
  });
}

void slipstream_plan_free(slipstream_plan *plan) { delete plan; }

int64_t slipstream_plan_blocks(const slipstream_plan *plan) { return plan->blocks; }

int64_t slipstream_plan_block_tasks(const slipstream_plan *) { return kBlockTasks; }

void slipstream_plan_block_ends(const slipstream_plan *plan, const double *end_ns,
                                double *out_block_end_ns) {
  const slipstream_program &program = *plan->program;
  for (int64_t k = 0; k < program.steps; ++k) {
    const double *end = end_ns + k * program.tasks;
    double *out = out_block_end_ns + k * plan->blocks;
    std::fill(out, out + plan->blocks, 0.0);
    for (int32_t p = 0; p < program.tasks; ++p) {
      const double at = end[program.order.empty() ? p : program.order[p]];
      if (at > out[block_of(p)]) out[block_of(p)] = at;
    }
  }
}

int32_t slipstream_resimulate(const slipstream_plan *plan, slipstream_resimulate_args *args,
                              slipstream_error *error) {
  return slipstream::guarded(error, [&]() -> int {
    slipstream_resimulate_args known = slipstream::read_struct(args);
    for (int64_t i = 0; i < known.edits; ++i)
      if (known.edit_task[i] < 0 || known.edit_task[i] >= plan->program->tasks)
        return slipstream::fail(error, SLIPSTREAM_INVALID, i, "edited task out of range");
    known.out_recomputed_tasks = 0;
    const bool finished = slipstream::Resimulation(*plan, known).run();
    args->out_recomputed_tasks = known.out_recomputed_tasks;
    if (!finished)
      return slipstream::fail(error, SLIPSTREAM_TOO_MUCH, -1, "a full pass is cheaper");
    return SLIPSTREAM_OK;
  });
}

void slipstream_materialise(const slipstream_plan *plan, const double *base_ns,
                            const int32_t *slot, const double *delta_ns, const double *slot_ns,
                            double *out_ns) {
  const slipstream_program &program = *plan->program;
  for (int64_t k = 0; k < program.steps; ++k) {
    const double *base = base_ns + k * program.tasks;
    double *out = out_ns + k * program.tasks;
    for (int32_t b = 0; b < plan->blocks; ++b) {
      const int64_t cell = k * plan->blocks + b;
      const int32_t first = b * kBlockTasks;
      const int32_t last =
          static_cast<int32_t>(std::min<int64_t>(int64_t{first} + kBlockTasks, program.tasks));
      const int32_t *order = program.order.empty() ? nullptr : program.order.data();
      if (slot[cell] >= 0) {
        const double *recomputed = slot_ns + int64_t{slot[cell]} * kBlockTasks;
        for (int32_t p = first; p < last; ++p)
          out[order == nullptr ? p : order[p]] = recomputed[p - first];
      } else if (order == nullptr) {
        // The common case by far; alone in its loop, it is vectorised.
        const double delta = delta_ns[cell];
        for (int32_t p = first; p < last; ++p) out[p] = base[p] + delta;
      } else {
        for (int32_t p = first; p < last; ++p) out[order[p]] = base[order[p]] + delta_ns[cell];
      }
    }
  }
}

}  // extern "C"
