// Transfers as fluids: every flow has a rate, and the rates of one instant are max-min fair.
//
// A flow's *level* is its rate divided by its weight. Rates are max-min fair when every flow has a
// bottleneck: a saturated link of its path on which no flow has a higher level. That certificate
// is also how rates are updated when flows start and end, without inspecting the others:
//
//   1. Begin with the set S of flows that started, and those whose bottleneck a flow left.
//   2. Share what the flows outside S leave of each link among the flows of S: raise all levels
//      together and freeze the flows of each link that fills up (progressive filling).
//   3. Inspect the links of S: a flow outside whose certificate no longer holds there, or which is
//      above a flow of S that has its bottleneck there, joins S; back to 2.
//
// When no flow joins, every flow has its certificate, so the rates are exact. Priorities are
// strict: classes are solved from the most urgent on, each on what those before it leave.
//
// `_network_reference.py` is the same algorithm, for reading; it gives the same bits, so sums here
// are taken in an order that does not depend on the containers' insides.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "heap.h"
#include "internal.h"

namespace slipstream {

class Network {
 public:
  Network(const slipstream_program &program, slipstream_simulate_args &args);

  bool moves(int32_t task) const { return !flows_.empty() && flows_.bytes[task] > 0.0; }

  // The instance starts to move its bytes at the time of the next `solve`.
  void begin(int32_t instance) { arrived_.push_back(instance); }

  // Brings all rates up to date after what came and went at `now_ns`.
  void solve(double now_ns);

  // When the next flow ends if nothing else happens before; infinite without flows.
  double next_end_ns();

  // The flows that end by `now_ns`, or after it by less than clocks and sums can tell, in order of
  // instances. They are off their links afterwards.
  const std::vector<int32_t> &take_ended(double now_ns);

 private:
  struct OnLink {
    int32_t flow;
    int32_t hop;  // which link of the flow's path this is
  };
  struct Path {
    const int32_t *first;
    const int32_t *last;
    const int32_t *begin() const { return first; }
    const int32_t *end() const { return last; }
  };
  struct Flow {
    double left_bytes;  // at since_ns
    double rate;
    double level;
    double since_ns;
    double weight;
    double new_level;
    Path path;
    int32_t instance;
    int32_t rank;        // of its priority, 0 the most urgent
    int32_t bottleneck;  // -1 before the first solve
    int32_t new_bottleneck;
    uint32_t version;    // of its entry in ends_
    bool in_set;
    bool seeded;
  };
  struct End {
    double time_ns;
    int32_t flow;
    uint32_t version;
    int32_t instance;
    Key key() const {
      return static_cast<Key>(time_bits(time_ns)) << 64 |
             static_cast<uint64_t>(static_cast<uint32_t>(instance)) << 32 | version;
    }
  };
  // A link that fills up when levels have risen so far.
  struct Filling {
    double level;
    int32_t index;  // in touched_
    Key key() const {
      return static_cast<Key>(time_bits(level)) << 64 | static_cast<uint32_t>(index);
    }
  };
  struct Member {
    int32_t flow;
    int32_t next;  // on the same link, or -1
  };
  // A link as the set being solved sees it.
  struct Touched {
    double taken;        // by more urgent classes and by flows outside the set
    double residual;     // remaining capacity for flows of the set that are not frozen
    double weight;       // of those flows
    double set_weight;   // of all flows of the set
    double old_load;     // of the whole set, at the rates it has
    double new_load;     // and at those it will have
    double outside_max;  // highest level of a flow outside the set
    double bound_min;    // lowest level of a flow outside that has its bottleneck here
    double set_max;      // highest new level in the set
    double set_min;      // lowest new level of a flow of the set that has its bottleneck here
    int32_t link;
    int32_t open;        // flows of the set that are not frozen
    int32_t count;       // flows of the set
    int32_t first;       // the set's flows here: a list in members_
    int32_t last;
    bool stale;          // a flow joined since the others were inspected
  };

  void attach(int32_t instance, double now_ns);
  void detach(int32_t flow);
  void seed(int32_t flow);
  void solve_class(int32_t rank, double now_ns);
  void gather(int32_t rank, std::size_t first);
  void look_outside(Touched &touched, int32_t rank) const;
  void fill();
  bool find_violations(int32_t rank);
  void accept(int32_t rank, double now_ns);
  void seed_below(const Touched &touched, int32_t rank);
  void set_rate(int32_t flow, double now_ns);
  void record(const Flow &flow, double now_ns);
  void drop_stale_ends();

  const slipstream_program &program_;
  slipstream_simulate_args &args_;
  const Flows &flows_;
  std::vector<int32_t> rank_of_task_;  // empty when there is one class
  int32_t ranks_ = 1;
  bool weighted_ = false;

  std::vector<Flow> flow_;
  std::vector<std::vector<int32_t>> place_;  // [flow][hop]: index in on_[link]
  std::vector<int32_t> free_;
  std::vector<std::vector<OnLink>> on_;  // [link]
  Heap<End> ends_;
  std::size_t active_ = 0;

  std::vector<int32_t> arrived_;
  std::vector<int32_t> ended_;  // instances
  std::vector<int32_t> ended_flow_;
  std::vector<uint8_t> freed_;  // [link]
  std::vector<int32_t> freed_links_;
  std::vector<std::vector<int32_t>> seeds_;  // [rank]

  // Of the class being solved.
  std::vector<int32_t> set_;
  std::vector<Touched> touched_;
  std::vector<int32_t> slot_;  // [link]: index in touched_, or -1
  std::vector<int32_t> stale_;  // indices in touched_
  std::vector<Member> members_;
  Heap<Filling> filling_;
};

}  // namespace slipstream
