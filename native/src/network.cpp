// See network.h.

#include "network.h"

#include <algorithm>
#include <cmath>

#include "ranks.h"

namespace slipstream {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
// Levels and loads that differ by less are equal. Far above what sums of thousands of rates round
// to, far below what is promised (1e-9).
constexpr double kEqual = 1e-11;
// A rate that changes by less keeps its old value, so that its flow need not be touched.
constexpr double kSameRate = 1e-12;
// Share of a capacity that is too small to be distributed.
constexpr double kNothing = 1e-12;
// Flows that would end together, but for rounding, do end together: 2^-42 of the time passed.
constexpr double kTogether = 0x1p-42;

}  // namespace

Network::Network(const slipstream_program &program, slipstream_simulate_args &args)
    : program_(program), args_(args), flows_(program.flows) {
  args_.out_changes = 0;
  if (flows_.empty()) return;
  on_.resize(flows_.capacity.size());
  slot_.assign(flows_.capacity.size(), -1);
  freed_.assign(flows_.capacity.size(), 0);
  for (const double weight : flows_.weight) weighted_ = weighted_ || weight != 1.0;
  ranks_ = rank_by_priority(program, rank_of_task_);
  seeds_.resize(static_cast<std::size_t>(ranks_));
}

// ---- flows come and go ----------------------------------------------------------------------

void Network::attach(int32_t instance, double now_ns) {
  int32_t id;
  if (free_.empty()) {
    id = static_cast<int32_t>(flow_.size());
    flow_.emplace_back();
    flow_.back().version = 0;
    place_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  Flow &flow = flow_[id];
  const int32_t task = instance < program_.tasks ? instance : instance % program_.tasks;
  flow.instance = instance;
  // Read in every round; the offsets of all tasks would not stay in the cache.
  const int32_t *links = flows_.link.data();
  flow.path = {links + flows_.offset[task], links + flows_.offset[task + 1]};
  flow.left_bytes = flows_.bytes[task];
  flow.weight = flows_.weight.empty() ? 1.0 : flows_.weight[task];
  flow.rank = rank_of_task_.empty() ? 0 : rank_of_task_[task];
  flow.rate = flow.level = 0.0;
  flow.since_ns = now_ns;
  flow.bottleneck = -1;
  flow.in_set = flow.seeded = false;
  place_[id].clear();
  for (const int32_t link : flow.path) {
    place_[id].push_back(static_cast<int32_t>(on_[link].size()));
    on_[link].push_back({id, static_cast<int32_t>(place_[id].size()) - 1});
  }
  ++active_;
  seed(id);
}

void Network::detach(int32_t id) {
  Flow &flow = flow_[id];
  ++flow.version;
  int32_t hop = 0;
  for (const int32_t link : flow.path) {
    std::vector<OnLink> &there = on_[link];
    const int32_t hole = place_[id][hop++];
    there[hole] = there.back();
    place_[there[hole].flow][there[hole].hop] = hole;
    there.pop_back();
    if (!freed_[link]) {
      freed_[link] = 1;
      freed_links_.push_back(link);
    }
  }
  --active_;
}

void Network::seed(int32_t id) {
  Flow &flow = flow_[id];
  if (flow.seeded) return;
  flow.seeded = true;
  seeds_[flow.rank].push_back(id);
}

double Network::next_end_ns() {
  while (!ends_.empty() && flow_[ends_.top().flow].version != ends_.top().version) ends_.pop();
  return ends_.empty() ? kInfinite : ends_.top().time_ns;
}

const std::vector<int32_t> &Network::take_ended(double now_ns) {
  ended_.clear();
  ended_flow_.clear();
  const double by_ns = now_ns + now_ns * kTogether;
  while (next_end_ns() <= by_ns) {
    ended_flow_.push_back(ends_.top().flow);
    ends_.pop();
  }
  if (ended_flow_.empty()) return ended_;
  std::sort(ended_flow_.begin(), ended_flow_.end(),
            [&](int32_t a, int32_t b) { return flow_[a].instance < flow_[b].instance; });
  for (const int32_t id : ended_flow_) {
    ended_.push_back(flow_[id].instance);
    detach(id);
  }
  for (const int32_t link : freed_links_) {
    freed_[link] = 0;
    for (const OnLink &entry : on_[link])
      if (flow_[entry.flow].bottleneck == link) seed(entry.flow);
  }
  freed_links_.clear();
  free_.insert(free_.end(), ended_flow_.begin(), ended_flow_.end());
  return ended_;
}

// ---- rates ----------------------------------------------------------------------------------

void Network::solve(double now_ns) {
  std::sort(arrived_.begin(), arrived_.end());
  for (const int32_t instance : arrived_) attach(instance, now_ns);
  arrived_.clear();
  for (int32_t rank = 0; rank < ranks_; ++rank)
    if (!seeds_[rank].empty()) solve_class(rank, now_ns);
  drop_stale_ends();
}

void Network::solve_class(int32_t rank, double now_ns) {
  set_.swap(seeds_[rank]);
  seeds_[rank].clear();
  for (const int32_t id : set_) {
    flow_[id].in_set = true;
    flow_[id].seeded = false;
  }
  touched_.clear();
  members_.clear();
  std::size_t gathered = 0;
  do {
    gather(rank, gathered);
    gathered = set_.size();
    fill();
  } while (find_violations(rank));
  for (const Touched &touched : touched_) slot_[touched.link] = -1;
  accept(rank, now_ns);
}

// The links of the set's flows from `first` on, and what others take of them. What a round before
// found about the other links still holds: no flow there has joined.
void Network::gather(int32_t rank, std::size_t first) {
  stale_.clear();
  for (std::size_t i = first; i < set_.size(); ++i) {
    const Flow &flow = flow_[set_[i]];
    for (const int32_t link : flow.path) {
      if (slot_[link] < 0) {
        slot_[link] = static_cast<int32_t>(touched_.size());
        touched_.push_back(Touched{});
        touched_.back().link = link;
        touched_.back().first = touched_.back().last = -1;
      }
      Touched &touched = touched_[slot_[link]];
      if (!touched.stale) {
        touched.stale = true;
        stale_.push_back(slot_[link]);
      }
      const int32_t member = static_cast<int32_t>(members_.size());
      members_.push_back({set_[i], -1});
      (touched.last < 0 ? touched.first : members_[touched.last].next) = member;
      touched.last = member;
      ++touched.count;
      touched.set_weight += flow.weight;
      touched.old_load += flow.rate;
    }
  }
  for (const int32_t index : stale_) look_outside(touched_[index], rank);
}

void Network::look_outside(Touched &touched, int32_t rank) const {
  touched.stale = false;
  touched.taken = touched.outside_max = 0.0;
  touched.bound_min = kInfinite;
  for (const OnLink &entry : on_[touched.link]) {
    const Flow &flow = flow_[entry.flow];
    if (flow.rank > rank || (flow.rank == rank && flow.in_set)) continue;
    touched.taken += flow.rate;
    if (flow.rank < rank) continue;
    touched.outside_max = std::max(touched.outside_max, flow.level);
    if (flow.bottleneck == touched.link)
      touched.bound_min = std::min(touched.bound_min, flow.level);
  }
}

// Progressive filling of the set.
void Network::fill() {
  filling_.clear();
  for (std::size_t i = 0; i < touched_.size(); ++i) {
    Touched &touched = touched_[i];
    const double capacity = flows_.capacity[touched.link];
    const double left = capacity - touched.taken;
    touched.residual = left > capacity * kNothing ? left : 0.0;
    touched.weight = touched.set_weight;
    touched.open = touched.count;
    touched.new_load = touched.set_max = 0.0;
    touched.set_min = kInfinite;
    if (touched.count > 1)
      filling_.push({touched.residual / touched.weight, static_cast<int32_t>(i)});
  }
  // Of the links that a flow has to itself, only the one that fills up first can hold it up.
  for (const int32_t id : set_) {
    Flow &flow = flow_[id];
    flow.new_bottleneck = -1;
    Filling alone{kInfinite, -1};
    for (const int32_t link : flow.path) {
      const int32_t index = slot_[link];
      if (touched_[index].count > 1) continue;
      const Filling here{touched_[index].residual / touched_[index].weight, index};
      if (here.key() < alone.key()) alone = here;
    }
    if (alone.index >= 0) filling_.push(alone);
  }
  std::size_t open = set_.size();
  while (open > 0) {
    const auto [key, index] = filling_.top();
    filling_.pop();
    Touched &full = touched_[index];
    if (full.open == 0) continue;
    if (weighted_) {
      // Taking weights away one by one would leave a rounding error as large as the heaviest.
      full.weight = 0.0;
      for (int32_t m = full.first; m >= 0; m = members_[m].next)
        if (flow_[members_[m].flow].new_bottleneck < 0)
          full.weight += flow_[members_[m].flow].weight;
    }
    const double level = full.residual / full.weight;
    if (level > key) {
      filling_.push({level, index});
      continue;
    }
    for (int32_t m = full.first; m >= 0; m = members_[m].next) {
      Flow &flow = flow_[members_[m].flow];
      if (flow.new_bottleneck >= 0) continue;
      flow.new_bottleneck = full.link;
      flow.new_level = level;
      const double rate = level * flow.weight;
      for (const int32_t link : flow.path) {
        Touched &touched = touched_[slot_[link]];
        touched.residual = std::max(0.0, touched.residual - rate);
        touched.weight -= flow.weight;
        --touched.open;
      }
      --open;
    }
  }
  for (const int32_t id : set_) {
    const Flow &flow = flow_[id];
    for (const int32_t link : flow.path) {
      Touched &touched = touched_[slot_[link]];
      touched.new_load += flow.new_level * flow.weight;
      touched.set_max = std::max(touched.set_max, flow.new_level);
      if (flow.new_bottleneck == link)
        touched.set_min = std::min(touched.set_min, flow.new_level);
    }
  }
}

// Takes into the set whom the new levels leave without a certificate, or who denies one to the set.
bool Network::find_violations(int32_t rank) {
  const std::size_t before = set_.size();
  for (const Touched &touched : touched_) {
    const double load = touched.taken + touched.new_load;
    const bool full = load >= flows_.capacity[touched.link] * (1.0 - kEqual);
    const double top = std::max(touched.set_max, touched.outside_max) * (1.0 - kEqual);
    const double ceiling = touched.set_min * (1.0 + kEqual);
    const bool unbound = touched.bound_min < kInfinite && (!full || touched.bound_min < top);
    if (!unbound && touched.outside_max <= ceiling) continue;
    for (const OnLink &entry : on_[touched.link]) {
      Flow &flow = flow_[entry.flow];
      if (flow.rank != rank || flow.in_set) continue;
      const bool lost = flow.bottleneck == touched.link && (!full || flow.level < top);
      if (!lost && flow.level <= ceiling) continue;
      flow.in_set = true;
      set_.push_back(entry.flow);
    }
  }
  return set_.size() > before;
}

void Network::accept(int32_t rank, double now_ns) {
  for (const int32_t id : set_) {
    flow_[id].in_set = false;
    set_rate(id, now_ns);
  }
  set_.clear();
  if (ranks_ == 1) return;
  for (const Touched &touched : touched_) seed_below(touched, rank);
}

// Less urgent flows that have to make room, or that may have more.
void Network::seed_below(const Touched &touched, int32_t rank) {
  const double slack = flows_.capacity[touched.link] * kSameRate;
  const bool more = touched.new_load > touched.old_load + slack;
  if (!more && touched.new_load >= touched.old_load - slack) return;
  for (const OnLink &entry : on_[touched.link]) {
    const Flow &flow = flow_[entry.flow];
    if (flow.rank > rank && (more || flow.bottleneck == touched.link)) seed(entry.flow);
  }
}

void Network::set_rate(int32_t id, double now_ns) {
  Flow &flow = flow_[id];
  const double rate = flow.new_level * flow.weight;
  const bool moved = flow.bottleneck != flow.new_bottleneck;
  flow.bottleneck = flow.new_bottleneck;
  if (std::fabs(rate - flow.rate) <= kSameRate * std::max(rate, flow.rate)) {
    if (moved) record(flow, now_ns);
    return;
  }
  flow.left_bytes -= flow.rate * (now_ns - flow.since_ns);
  flow.since_ns = now_ns;
  flow.rate = rate;
  flow.level = flow.new_level;
  ++flow.version;
  if (rate > 0.0)
    ends_.push({now_ns + std::max(0.0, flow.left_bytes) / rate, id, flow.version, flow.instance});
  record(flow, now_ns);
}

void Network::record(const Flow &flow, double now_ns) {
  const int64_t n = args_.out_changes++;
  if (n >= args_.changes_capacity) return;
  args_.out_change_ns[n] = now_ns;
  args_.out_change_rate[n] = flow.rate;
  args_.out_change_instance[n] = flow.instance;
  args_.out_change_link[n] = flow.bottleneck;
}

// Every change of a rate leaves an entry behind.
void Network::drop_stale_ends() {
  if (ends_.size() <= 4 * active_ + 1024) return;
  ends_.filter([&](const End &end) { return flow_[end.flow].version == end.version; });
}

}  // namespace slipstream
