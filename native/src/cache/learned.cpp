#include "cache/learned.h"

#include <algorithm>
#include <cmath>

namespace slipstream {
namespace cache {
namespace {

// Observations that the shape of a broader class counts for.
constexpr double kShrinkage = 20.0;
// Caches up to this size are searched whole for the object to evict; in larger ones, so many
// objects are drawn, and the best of them are compared again at the next eviction.
constexpr size_t kSearched = 512, kDrawn = 64, kRemembered = 16;

struct Edges {
  double first[kBins + 1];
  int8_t of_small[1024];
  Edges() {
    first[0] = 0.0;
    for (int b = 1; b <= kBins; ++b) first[b] = std::exp2((b - 1) / 3.0);
    for (int age = 0; age < 1024; ++age) of_small[age] = static_cast<int8_t>(search(age));
  }
  int search(double age) const {
    return static_cast<int>(std::upper_bound(first, first + kBins, age) - first) - 1;
  }
};
const Edges &table() {
  static const Edges edges;
  return edges;
}

// Hazards by bin of `ended` and `open` intervals, shrunk to `prior`; zero prior hazards if null.
void hazards(const std::vector<double> &ended, const std::vector<double> &open,
             const double *prior, double strength, double *out) {
  double reach = 0.0;
  for (int b = kBins - 1; b >= 0; --b) {
    const double exposed = reach + ended[b] + 0.5 * open[b];
    reach += ended[b] + open[b];
    const double expected = prior == nullptr ? 0.0 : strength * prior[b];
    out[b] = (ended[b] + expected) / std::max(exposed + strength, 1e-9);
  }
}

}  // namespace

const double *edges() { return table().first; }

int bin_of(int64_t age) {
  return age < 1024 ? table().of_small[std::max<int64_t>(age, 0)]
                    : table().search(static_cast<double>(age));
}

void gittins(const double *hazard, double *rank) {
  const double *edge = table().first;
  double middle[kBins];
  for (int b = 0; b < kBins; ++b) middle[b] = 0.5 * (edge[b] + edge[b + 1]);
  for (int a = 0; a < kBins; ++a) {
    double alive = 1.0, spent = 0.0, best = 0.0;
    for (int b = a; b < kBins; ++b) {
      const double ends = alive * std::min(hazard[b], 1.0);
      const double wait = middle[b] - middle[a] + 1.0;
      spent += ends * wait;
      alive -= ends;
      const double density = (1.0 - alive) / (spent + alive * wait);
      best = std::max(best, density);
      if (alive < 1e-6) break;
    }
    rank[a] = best;
  }
}

void Learned::set_prior(int32_t context, const double *hazard, double strength) {
  if (static_cast<size_t>(context) >= priors_.size()) priors_.resize(context + 1);
  priors_[context] = {std::vector<double>(hazard, hazard + kBins), strength};
  learned_at_ = 0;
}

void Learned::grow(size_t count) {
  last_.resize(count, 0);
  class_.resize(count, 0);
  slot_of_.resize(count, -1);
  uses_.resize(count, 0);
}

int32_t Learned::class_of(const Request &now, int64_t interval) {
  int uses = 0;  // octaves
  while (uses < kUses - 1 && uses_[now.id] >> uses != 0) ++uses;
  const int length = interval <= 0 ? 0 : std::min(1 + bin_of(interval) / 12, kIntervals - 1);
  const int32_t number = (std::max(now.context, 0) * kUses + uses) * kIntervals + length;
  if (static_cast<size_t>(number) >= classes_.size()) {
    const size_t contexts = 1 + std::max(now.context, 0);
    classes_.resize(contexts * kFeatures);
    activity_.resize(contexts);
    ranks_.resize(classes_.size() * kBins, 0.0);
    learned_at_ = 0;
  }
  return number;
}

void Learned::note(const Request &now) {
  const int32_t id = now.id;
  int64_t interval = 0;
  if (last_[id] > 0) {
    interval = clock_ - last_[id];
    classes_[class_[id]].ended[bin_of(interval)] += std::exp(-interval / memory_);
  } else {
    ++tracked_;
  }
  if (last_[id] > 0 && uses_[id] < 255) ++uses_[id];
  last_[id] = clock_;
  class_[id] = class_of(now, interval);
  Activity &activity = activity_[class_[id] / kFeatures];
  if (activity.last > 0) activity.longest = std::max(activity.longest, clock_ - activity.last);
  activity.last = clock_;
  classes_[class_[id]].seen = true;
  const int64_t due = std::max<int64_t>(
      {128, tracked_ / 8, static_cast<int64_t>(classes_.size() / kFeatures) * 8});
  if (learned_at_ == 0 || clock_ - learned_at_ >= std::min<int64_t>(due, clock_)) learn();
}

void Learned::learn() {
  const double faded = learned_at_ == 0 ? 1.0 : std::exp((learned_at_ - clock_) / memory_);
  memory_ = std::max(2e4, 4.0 * static_cast<double>(tracked_));
  learned_at_ = clock_;
  for (Distribution &one : classes_) {
    for (double &weight : one.ended) weight *= faded;
    std::fill(one.open.begin(), one.open.end(), 0.0);
  }
  for (size_t id = 0; id < last_.size(); ++id) {
    if (last_[id] == 0) continue;
    const int64_t age = clock_ - last_[id];
    if (age < 16 * memory_) classes_[class_[id]].open[bin_of(age)] += std::exp(-age / memory_);
  }
  const size_t contexts = classes_.size() / kFeatures;
  std::vector<Distribution> by_context(contexts);
  Distribution all;
  for (size_t number = 0; number < classes_.size(); ++number) {
    Distribution &sum = by_context[number / kFeatures];
    for (int b = 0; b < kBins; ++b) {
      sum.ended[b] += classes_[number].ended[b];
      sum.open[b] += classes_[number].open[b];
    }
  }
  for (const Distribution &one : by_context) {
    for (int b = 0; b < kBins; ++b) {
      all.ended[b] += one.ended[b];
      all.open[b] += one.open[b];
    }
  }
  double everywhere[kBins], context[kBins], own[kBins], shared[kBins];
  hazards(all.ended, all.open, nullptr, 0.0, everywhere);
  for (size_t number = 0; number < contexts; ++number) {
    const Distribution &sum = by_context[number];
    const bool known = number < priors_.size() && !priors_[number].hazard.empty();
    hazards(sum.ended, sum.open, known ? priors_[number].hazard.data() : everywhere,
            known ? priors_[number].strength : kShrinkage, context);
    gittins(context, shared);
    for (int feature = 0; feature < kFeatures; ++feature) {
      const Distribution &one = classes_[number * kFeatures + feature];
      double *rank = &ranks_[(number * kFeatures + feature) * kBins];
      if (one.seen) {
        hazards(one.ended, one.open, context, kShrinkage, own);
        gittins(own, rank);
      } else {
        std::copy(shared, shared + kBins, rank);
      }
    }
  }
}

void Learned::drop(int32_t id) {
  const int32_t slot = slot_of_[id];
  slots_[slot] = slots_.back();
  slot_of_[slots_[slot]] = slot;
  slots_.pop_back();
  slot_of_[id] = -1;
  evict(id);
}

// The cached object of the lowest rank.
int32_t Learned::cheapest() {
  const auto least = [this](const std::vector<int32_t> &ids) {
    int32_t best = -1;
    double lowest = std::numeric_limits<double>::infinity();
    for (const int32_t id : ids) {
      const double value = rank(id, clock_ - last_[id]);
      if (value < lowest) {
        lowest = value;
        best = id;
      }
    }
    return best;
  };
  if (slots_.size() <= kSearched) return least(slots_);
  candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(),
                                   [this](int32_t id) { return slot_of_[id] < 0; }),
                    candidates_.end());
  for (size_t n = 0; n < kDrawn; ++n) candidates_.push_back(slots_[random_() % slots_.size()]);
  std::sort(candidates_.begin(), candidates_.end());
  candidates_.erase(std::unique(candidates_.begin(), candidates_.end()), candidates_.end());
  const auto by_rank = [this](int32_t a, int32_t b) {
    return rank(a, clock_ - last_[a]) < rank(b, clock_ - last_[b]);
  };
  const size_t kept = std::min(kRemembered, candidates_.size());
  std::partial_sort(candidates_.begin(), candidates_.begin() + kept, candidates_.end(), by_rank);
  candidates_.resize(kept);
  return candidates_[0];
}

void Learned::miss(const Request &now) {
  note(now);
  size_[now.id] = now.size;
  const double own = rank(now.id, 0);
  while (!fits(now.size)) {
    const int32_t victim = cheapest();
    if (rank(victim, clock_ - last_[victim]) > own) return;
    drop(victim);
  }
  insert(now);
  slot_of_[now.id] = static_cast<int32_t>(slots_.size());
  slots_.push_back(now.id);
}

}  // namespace cache
}  // namespace slipstream
