// The event loop: lanes with policies, delays, gaps, preemption, counting resources, transfers.
//
// Time advances from instant to instant. At each, in rounds until nothing more happens at that
// time: (1) all events of the instant are applied; (2) every lane they touched is settled: it
// starts, resumes or preempts, or its head begins to wait for resources; (3) waiting heads that can
// have all they need start; (4) a preemptive lane left idle by a waiting head resumes what it
// suspended. Since (1) is finished before (2) begins, a lane chooses among *all* tasks ready at
// that time, and the order of events within one instant cannot change the result.
//
// `_engine_reference.py` is the same algorithm, for reading.

#include <algorithm>
#include <cmath>
#include <limits>

#include "heap.h"
#include "internal.h"
#include "network.h"
#include "packets.h"

namespace slipstream {
namespace {

enum EventKind : int32_t { kEnd, kReady, kGapOver, kBoundary, kTaskEnd, kFlow };

struct Event {
  double time_ns;
  uint64_t sequence;
  int32_t kind;
  int32_t index;  // an instance for kReady, kTaskEnd and kFlow, else a lane

  Key key() const { return static_cast<Key>(time_bits(time_ns)) << 64 | sequence; }
};

constexpr int32_t kReleased = -1;
constexpr int32_t kPrefetched = 8;

// All that the life of a task instance touches, two to a cache line: with random dependencies
// every array would cost a separate cache miss.
struct alignas(32) Instance {
  double ready_ns;      // until it starts; then its start
  double duration_ns;   // until it ends; then its end
  int32_t missing;      // predecessors that have not ended, or kReleased
  int32_t lane;
  int32_t priority;
  int32_t succs;        // where its successors begin
};

struct Suspended {
  Key key;
  double remaining_ns;
};

struct Lane {
  uint8_t policy = SLIPSTREAM_FIXED;
  bool touched = false;
  bool in_gap = false;
  int32_t running = -1;
  int32_t waiting = -1;  // head that waits for resources
  Key running_key = 0;
  double run_start_ns = 0.0;
  double run_end_ns = 0.0;
  double boundary_ns = -1.0;   // quantum boundary requested during this run
  uint64_t end_sequence = 0;   // the kEnd event that is not stale
  int64_t next = 0;            // fixed lanes: how many instances have started
  Heap<Ready> ready;             // other lanes: released and not started
  std::vector<Suspended> suspended;  // most urgent last
};

struct Waiter {
  double ready_ns;
  int32_t instance;
  int32_t lane;

  bool operator<(const Waiter &other) const {
    return ready_ns < other.ready_ns ||
           (ready_ns == other.ready_ns && instance < other.instance);
  }
};

struct Candidate {
  int32_t instance = -1;
  bool suspended = false;
};

// `Transfers` is a Network or a PacketNetwork.
template <typename Transfers>
class Loop {
 public:
  Loop(const slipstream_program &program, slipstream_simulate_args &args)
      : program_(program),
        args_(args),
        network_(program, args),
        has_needs_(!program.needs.offset.empty()),
        instances_(static_cast<std::size_t>(program.steps * program.tasks)),
        lanes_(static_cast<std::size_t>(program.lanes)),
        free_(program.capacity),
        queues_(program.capacity.size()) {
    for (int32_t l = 0; l < program.lanes; ++l) lanes_[l].policy = program.policy[l];
  }

  int run(slipstream_error *error) {
    make_instances();
    release_roots();
    settle_all();
    while (advance()) {
      while (!events_.empty() && events_.top().time_ns == now_) {
        const Event event = events_.top();
        events_.pop();
        if (!events_.empty()) prefetch_successors(events_.top());
        apply(event);
      }
      if (has_flows_)
        for (const int32_t instance : network_.take_ended(now_)) end_instance(instance);
      settle_all();
    }
    if (ended_ != static_cast<int64_t>(instances_.size()))
      return fail(error, SLIPSTREAM_STUCK, -1, "tasks left over without a cycle");
    write_timeline();
    return SLIPSTREAM_OK;
  }

 private:
  // To the next instant at which something happens; false when nothing does.
  bool advance() {
    if (!has_flows_) {
      if (events_.empty()) return false;
      now_ = events_.top().time_ns;
      return true;
    }
    if (!events_.empty() && events_.top().time_ns == now_) return true;
    network_.solve(now_);
    const double flow_end_ns = network_.next_end_ns();
    if (events_.empty() && flow_end_ns == std::numeric_limits<double>::infinity()) return false;
    now_ = events_.empty() ? flow_end_ns : std::min(flow_end_ns, events_.top().time_ns);
    return true;
  }

  int32_t task_of(int32_t instance) const {
    return instance < program_.tasks ? instance : instance % program_.tasks;
  }
  bool needs_something(int32_t task) const {
    return has_needs_ && program_.needs.offset[task + 1] > program_.needs.offset[task];
  }

  void push_event(double time_ns, EventKind kind, int32_t index) {
    events_.push(Event{time_ns, sequence_++, kind, index});
  }

  void touch(int32_t lane) {
    if (lanes_[lane].touched) return;
    lanes_[lane].touched = true;
    touched_.push_back(lane);
  }

  Key key_of(int32_t instance) const {
    return make_key(instances_[instance].priority, instances_[instance].ready_ns, instance);
  }

  static uint32_t urgency(Key key) { return static_cast<uint32_t>(key >> 96); }

  // ---- (1) events -------------------------------------------------------------------------

  void make_instances() {
    for (int64_t k = 0; k < program_.steps; ++k) {
      for (int32_t t = 0; t < program_.tasks; ++t) {
        const int32_t p = program_.position.empty() ? t : program_.position[t];
        const int32_t lane = program_.lane_by_id[t];
        const bool ranked =
            program_.policy[lane] >= SLIPSTREAM_PRIORITY && !program_.priority_by_id.empty();
        Instance &instance = instances_[k * program_.tasks + t];
        instance.ready_ns = 0.0;
        instance.duration_ns = args_.duration_ns[t];
        instance.missing = program_.preds.offset[p + 1] - program_.preds.offset[p];
        if (k > 0)
          instance.missing +=
              program_.lagged_preds.offset[p + 1] - program_.lagged_preds.offset[p];
        instance.lane = lane;
        instance.priority = ranked ? program_.priority_by_id[t] : 0;
        instance.succs = program_.succs_by_id.begin[t];
      }
    }
  }

  void release_roots() {
    for (std::size_t i = 0; i < instances_.size(); ++i)
      if (instances_[i].missing == 0) release(static_cast<int32_t>(i));
  }

  void write_timeline() const {
    for (std::size_t i = 0; i < instances_.size(); ++i) {
      args_.out_start_ns[i] = instances_[i].ready_ns;
      args_.out_end_ns[i] = instances_[i].duration_ns;
    }
  }

  void release(int32_t instance) {
    instances_[instance].missing = kReleased;
    const int32_t lane_id = instances_[instance].lane;
    Lane &lane = lanes_[lane_id];
    if (lane.policy == SLIPSTREAM_FIXED) {
      if (lane.running < 0 && !lane.in_gap && instance == next_in_fixed_order(lane_id))
        touch(lane_id);
      return;
    }
    lane.ready.push({key_of(instance)});
    if (lane.running < 0 || lane.policy == SLIPSTREAM_PREEMPTIVE) touch(lane_id);
  }

  int32_t next_in_fixed_order(int32_t lane_id) const {
    const int64_t first = program_.lane_task_offset[lane_id];
    const int64_t count = program_.lane_task_offset[lane_id + 1] - first;
    const int64_t next = lanes_[lane_id].next;
    if (count == 0 || next >= count * program_.steps) return -1;
    const int64_t step = program_.steps == 1 ? 0 : next / count;
    return static_cast<int32_t>(step * program_.tasks +
                                program_.lane_tasks_by_id[first + next - step * count]);
  }

  void apply(const Event &event) {
    if (event.kind == kReady) {
      release(event.index);
      return;
    }
    if (event.kind == kTaskEnd) {
      finish(event.index);
      return;
    }
    if (event.kind == kFlow) {
      network_.begin(event.index);
      return;
    }
    Lane &lane = lanes_[event.index];
    if (event.kind == kEnd) {
      if (event.sequence == lane.end_sequence && lane.running >= 0) end_running(event.index);
      return;
    }
    if (event.kind == kGapOver) lane.in_gap = false;
    touch(event.index);  // kBoundary: settling finds whether it still matters
  }

  // Fetches what the end after this one will touch; waiting for it would take a third of the time.
  // Inlined by force: GCC takes a function that only prefetches for one without effect.
  __attribute__((always_inline)) void prefetch_successors(const Event &event) const {
    if (event.kind != kEnd || lanes_[event.index].running < 0) return;
    const int32_t instance = lanes_[event.index].running;
    const int32_t *row = program_.succs_by_id.item.data() + instances_[instance].succs;
    const Instance *step = instances_.data() + (instance - task_of(instance));
    for (int32_t e = 1; e <= std::min(row[0], kPrefetched); ++e)
      __builtin_prefetch(step + row[e], 1);
  }

  // A transfer ended.
  void end_instance(int32_t instance) {
    const int32_t lane_id = instances_[instance].lane;
    if (lanes_[lane_id].policy == SLIPSTREAM_CONCURRENT)
      finish(instance);
    else
      end_running(lane_id);
  }

  void end_running(int32_t lane_id) {
    Lane &lane = lanes_[lane_id];
    const int32_t instance = lane.running;
    const int32_t task = task_of(instance);
    lane.running = -1;
    if (!program_.gap_by_id.empty()) {
      const double free_at = now_ + program_.gap_by_id[task];
      if (free_at > now_) {
        lane.in_gap = true;
        push_event(free_at, kGapOver, lane_id);
      }
    }
    if (!lane.in_gap || lane.waiting >= 0) touch(lane_id);
    if (needs_something(task)) give_back(task);
    finish(instance);
  }

  void finish(int32_t instance) {
    const int32_t task = task_of(instance);
    instances_[instance].duration_ns = now_;
    double &step_end = args_.out_step_end_ns[task == instance ? 0 : instance / program_.tasks];
    step_end = std::max(step_end, now_);
    ++ended_;
    const std::vector<int32_t> &succs = program_.succs_by_id.item;
    const std::vector<double> &delay = program_.succs_by_id.delay;
    const int32_t row = instances_[instance].succs;
    for (int32_t e = row + 1; e <= row + succs[row]; ++e)
      notify(instance - task + succs[e], delay.empty() ? 0.0 : delay[e]);
    const Rows &lagged = program_.lagged_succs_by_id;
    const int64_t next_step = int64_t{instance} - task + program_.tasks;
    if (lagged.empty() || next_step >= static_cast<int64_t>(instances_.size())) return;
    for (int32_t e = lagged.offset[task]; e < lagged.offset[task + 1]; ++e)
      notify(static_cast<int32_t>(next_step) + lagged.item[e],
             lagged.delay.empty() ? 0.0 : lagged.delay[e]);
  }

  void notify(int32_t instance, double delay_ns) {
    Instance &successor = instances_[instance];
    const double at = now_ + delay_ns;
    if (at > successor.ready_ns) successor.ready_ns = at;
    if (--successor.missing > 0) return;
    if (successor.ready_ns <= now_)
      release(instance);
    else
      push_event(successor.ready_ns, kReady, instance);
  }

  // ---- (2) lanes --------------------------------------------------------------------------

  void settle_all() {
    for (const int32_t lane : touched_) {
      lanes_[lane].touched = false;
      settle(lane);
    }
    touched_.clear();
    if (!has_needs_) return;
    serve_waiters();
    resume_behind_waiters();
  }

  Candidate candidate(int32_t lane_id) const {
    const Lane &lane = lanes_[lane_id];
    if (lane.in_gap) return {};
    if (lane.policy == SLIPSTREAM_FIXED) {
      if (lane.running >= 0) return {};
      const int32_t instance = next_in_fixed_order(lane_id);
      if (instance < 0 || instances_[instance].missing != kReleased) return {};
      return {instance, false};
    }
    if (lane.running >= 0) {
      if (lane.policy != SLIPSTREAM_PREEMPTIVE || lane.ready.empty() ||
          urgency(lane.ready.top().value) >= urgency(lane.running_key))
        return {};
      return {key_instance(lane.ready.top().value), false};
    }
    if (!lane.suspended.empty() &&
        (lane.ready.empty() || lane.suspended.back().key < lane.ready.top().value))
      return {key_instance(lane.suspended.back().key), true};
    if (lane.ready.empty()) return {};
    return {key_instance(lane.ready.top().value), false};
  }

  void settle(int32_t lane_id) {
    Lane &lane = lanes_[lane_id];
    if (lane.policy == SLIPSTREAM_CONCURRENT) {
      for (; !lane.ready.empty(); lane.ready.pop()) start_beside(key_instance(lane.ready.top().value));
      return;
    }
    const Candidate head = candidate(lane_id);
    if (lane.waiting >= 0 && (head.suspended || head.instance != lane.waiting)) withdraw(lane_id);
    if (head.instance < 0) return;
    if (head.suspended) {
      resume(lane_id);
    } else if (!needs_something(task_of(head.instance))) {
      if (lane.running < 0 || at_boundary(lane_id)) start(lane_id, head.instance);
    } else {
      if (lane.waiting < 0) enqueue(lane_id, head.instance);
      to_serve_.push_back(lane_id);
    }
  }

  // Whether the running task may be preempted now; if not, asks to be called when it may.
  bool at_boundary(int32_t lane_id) {
    Lane &lane = lanes_[lane_id];
    const double quantum = program_.quantum_ns.empty() ? 0.0 : program_.quantum_ns[lane_id];
    if (quantum == 0.0 || lane.boundary_ns == now_) return true;
    const double quanta = std::ceil((now_ - lane.run_start_ns) / quantum);
    const double boundary = lane.run_start_ns + quanta * quantum;
    if (boundary <= now_) return true;
    if (boundary < lane.run_end_ns && boundary != lane.boundary_ns) {
      lane.boundary_ns = boundary;
      push_event(boundary, kBoundary, lane_id);
    }
    return false;
  }

  void run_until(int32_t lane_id, Key key, double remaining_ns) {
    Lane &lane = lanes_[lane_id];
    lane.running = key_instance(key);
    lane.running_key = key;
    lane.run_start_ns = now_;
    lane.run_end_ns = now_ + remaining_ns;
    lane.boundary_ns = -1.0;
    if (network_.moves(task_of(lane.running))) {
      lane.end_sequence = 0;
      start_flow(lane.running, remaining_ns);
      return;
    }
    lane.end_sequence = sequence_;
    push_event(lane.run_end_ns, kEnd, lane_id);
  }

  void start_flow(int32_t instance, double latency_ns) {
    if (latency_ns > 0.0)
      push_event(now_ + latency_ns, kFlow, instance);
    else
      network_.begin(instance);
  }

  // On a concurrent lane.
  void start_beside(int32_t instance) {
    const double duration_ns = instances_[instance].duration_ns;
    instances_[instance].ready_ns = now_;
    if (network_.moves(task_of(instance)))
      start_flow(instance, duration_ns);
    else
      push_event(now_ + duration_ns, kTaskEnd, instance);
  }

  void start(int32_t lane_id, int32_t instance) {
    Lane &lane = lanes_[lane_id];
    Instance &starting = instances_[instance];
    __builtin_prefetch(&program_.succs_by_id.item[starting.succs]);
    if (lane.running >= 0)
      lane.suspended.push_back({lane.running_key, lane.run_end_ns - now_});
    // `ready_ns` becomes the start below; a key is built from it again only if necessary.
    const Key key = lane.policy == SLIPSTREAM_PREEMPTIVE ? key_of(instance)
                                                         : static_cast<uint32_t>(instance);
    if (lane.policy == SLIPSTREAM_FIXED) {
      ++lane.next;
    } else {
      lane.ready.pop();
      if (!lane.ready.empty()) __builtin_prefetch(&instances_[key_instance(lane.ready.top().value)]);
    }
    starting.ready_ns = now_;
    run_until(lane_id, key, starting.duration_ns);
  }

  void resume(int32_t lane_id) {
    Lane &lane = lanes_[lane_id];
    const Suspended suspended = lane.suspended.back();
    lane.suspended.pop_back();
    run_until(lane_id, suspended.key, suspended.remaining_ns);
  }

  // ---- (3) and (4) resources ---------------------------------------------------------------
  //
  // A head waits in the queue of every resource it needs, in order of (ready, instance), and
  // starts when it is first in all of them and all amounts are free. No head overtakes, so none
  // starves; all amounts are acquired together, which excludes hold-and-wait and deadlock.

  void enqueue(int32_t lane_id, int32_t instance) {
    lanes_[lane_id].waiting = instance;
    const Waiter waiter{instances_[instance].ready_ns, instance, lane_id};
    const int32_t task = task_of(instance);
    for (int64_t i = program_.needs.offset[task]; i < program_.needs.offset[task + 1]; ++i) {
      std::vector<Waiter> &queue = queues_[program_.needs.resource[i]];
      queue.insert(std::upper_bound(queue.begin(), queue.end(), waiter), waiter);
    }
  }

  // Leaves the queues; the new first of each may now be served.
  void withdraw(int32_t lane_id) {
    const int32_t instance = lanes_[lane_id].waiting;
    lanes_[lane_id].waiting = -1;
    const Waiter waiter{instances_[instance].ready_ns, instance, lane_id};
    const int32_t task = task_of(instance);
    for (int64_t i = program_.needs.offset[task]; i < program_.needs.offset[task + 1]; ++i) {
      std::vector<Waiter> &queue = queues_[program_.needs.resource[i]];
      queue.erase(std::lower_bound(queue.begin(), queue.end(), waiter));
      if (!queue.empty()) to_serve_.push_back(queue.front().lane);
    }
  }

  void give_back(int32_t task) {
    for (int64_t i = program_.needs.offset[task]; i < program_.needs.offset[task + 1]; ++i) {
      const int32_t resource = program_.needs.resource[i];
      free_[resource] += program_.needs.amount[i];
      if (!queues_[resource].empty()) touch(queues_[resource].front().lane);
    }
  }

  bool can_have_all(int32_t instance) const {
    const int32_t task = task_of(instance);
    for (int64_t i = program_.needs.offset[task]; i < program_.needs.offset[task + 1]; ++i) {
      const int32_t resource = program_.needs.resource[i];
      if (queues_[resource].front().instance != instance ||
          free_[resource] < program_.needs.amount[i])
        return false;
    }
    return true;
  }

  void serve_waiters() {
    while (!to_serve_.empty()) {
      const int32_t lane_id = to_serve_.back();
      to_serve_.pop_back();
      Lane &lane = lanes_[lane_id];
      const int32_t instance = lane.waiting;
      if (instance < 0 || !can_have_all(instance)) {
        if (instance >= 0 && lane.running < 0 && !lane.suspended.empty())
          left_idle_.push_back(lane_id);
        continue;
      }
      if (lane.running >= 0 && !at_boundary(lane_id)) continue;
      const int32_t task = task_of(instance);
      for (int64_t i = program_.needs.offset[task]; i < program_.needs.offset[task + 1]; ++i)
        free_[program_.needs.resource[i]] -= program_.needs.amount[i];
      withdraw(lane_id);
      start(lane_id, instance);
    }
  }

  // In order of lanes, because a resumed task may send its waiter away, which serves others.
  void resume_behind_waiters() {
    while (!left_idle_.empty()) {
      const auto lowest = std::min_element(left_idle_.begin(), left_idle_.end());
      const int32_t lane_id = *lowest;
      *lowest = left_idle_.back();
      left_idle_.pop_back();
      Lane &lane = lanes_[lane_id];
      if (lane.running >= 0 || lane.waiting < 0) continue;
      resume(lane_id);
      if (candidate(lane_id).instance != lane.waiting) withdraw(lane_id);
      serve_waiters();
    }
  }

  const slipstream_program &program_;
  slipstream_simulate_args &args_;
  Transfers network_;
  const bool has_needs_;
  const bool has_flows_ = !program_.flows.empty();
  double now_ = 0.0;
  uint64_t sequence_ = 1;
  int64_t ended_ = 0;
  AlignedVector<Instance> instances_;
  std::vector<Lane> lanes_;
  Heap<Event> events_;
  std::vector<int32_t> touched_;
  std::vector<int64_t> free_;
  std::vector<std::vector<Waiter>> queues_;
  std::vector<int32_t> to_serve_;   // lanes whose waiter may now be first
  std::vector<int32_t> left_idle_;  // preemptive lanes with a waiter and something suspended
};

}  // namespace

int simulate_events(const slipstream_program &program, slipstream_simulate_args &args,
                    slipstream_error *error) {
  for (int64_t k = 0; k < program.steps; ++k) args.out_step_end_ns[k] = 0.0;
  if (program.tasks == 0) return SLIPSTREAM_OK;
  if (!program.packets.empty()) return Loop<PacketNetwork>(program, args).run(error);
  return Loop<Network>(program, args).run(error);
}

}  // namespace slipstream
