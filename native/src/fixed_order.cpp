// All lanes fixed, nothing to wait for but predecessors: one pass in topological order.
//
// Algorithm 1 of Daydream (USENIX ATC 2020) with the frontier replaced by an order made once:
//   start = max(lane progress, ready);  lane progress = start + duration + gap.
// Durations, lanes and predecessor lists are streamed; only the ends of predecessors are gathered.

#include "internal.h"

namespace slipstream {
namespace {

inline double later(double a, double b) { return a > b ? a : b; }

template <bool HasDelay>
inline double gather(const Rows &preds, int32_t p, const double *end, double ready) {
  const int32_t last = preds.offset[p + 1];
  for (int32_t e = preds.offset[p]; e < last; ++e) {
    double at = end[preds.item[e]];
    if (HasDelay) at += preds.delay[e];
    ready = later(ready, at);
  }
  return ready;
}

// `end` is indexed by position. With the identity order it is the output itself.
template <bool Identity, bool HasDelay, bool HasGap>
double pass(const slipstream_program &program, const double *duration, double *progress,
            const double *previous_end, double *end, double *out_start, double *out_end) {
  const int32_t *lane = program.lane.data();
  const bool lagged = previous_end != nullptr && !program.lagged_preds.empty();
  double last = 0.0;
  for (int32_t p = 0; p < program.tasks; ++p) {
    const int32_t t = Identity ? p : program.order[p];
    double start = gather<HasDelay>(program.preds, p, end, progress[lane[p]]);
    if (lagged) start = gather<HasDelay>(program.lagged_preds, p, previous_end, start);
    const double finish = start + duration[t];
    out_start[t] = start;
    end[p] = finish;
    if (!Identity) out_end[t] = finish;
    progress[lane[p]] = HasGap ? finish + program.gap_ns[p] : finish;
    last = later(last, finish);
  }
  return last;
}

template <bool Identity, bool HasDelay, bool HasGap>
void all_steps(const slipstream_program &program, const slipstream_simulate_args &args) {
  const std::size_t tasks = static_cast<std::size_t>(program.tasks);
  std::vector<double> progress(static_cast<std::size_t>(program.lanes), 0.0);
  std::vector<double> scratch(Identity ? 0 : tasks * (program.steps > 1 ? 2 : 1));
  const double *previous = nullptr;
  for (int64_t k = 0; k < program.steps; ++k) {
    double *out_start = args.out_start_ns + k * program.tasks;
    double *out_end = args.out_end_ns + k * program.tasks;
    double *end = Identity ? out_end : scratch.data() + (k % 2) * tasks;
    args.out_step_end_ns[k] = pass<Identity, HasDelay, HasGap>(
        program, args.duration_ns, progress.data(), previous, end, out_start, out_end);
    previous = end;
  }
}

}  // namespace

void simulate_fixed_order(const slipstream_program &program,
                          const slipstream_simulate_args &args) {
  using Pass = void (*)(const slipstream_program &, const slipstream_simulate_args &);
  static constexpr Pass kPasses[2][2][2] = {
      {{all_steps<false, false, false>, all_steps<false, false, true>},
       {all_steps<false, true, false>, all_steps<false, true, true>}},
      {{all_steps<true, false, false>, all_steps<true, false, true>},
       {all_steps<true, true, false>, all_steps<true, true, true>}}};
  const bool delay = !program.preds.delay.empty() || !program.lagged_preds.delay.empty();
  kPasses[program.order.empty()][delay][!program.gap_ns.empty()](program, args);
}

}  // namespace slipstream
