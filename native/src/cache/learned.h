// A policy that ranks objects by the hit density that their contexts predict.

#ifndef SLIPSTREAM_CACHE_LEARNED_H_
#define SLIPSTREAM_CACHE_LEARNED_H_

#include <random>

#include "cache/policy.h"

namespace slipstream {
namespace cache {

// Bins of ages in requests: bin b > 0 begins at 3 bins per octave, so that 64 reach 2^21 requests.
constexpr int kUses = 8, kIntervals = 6, kFeatures = kUses * kIntervals;
const double *edges();
int bin_of(int64_t age);
// Hit density by age bin: the largest P(T - a <= h) / E[min(T - a, h)] over h, where T has `hazard`.
void gittins(const double *hazard, double *rank);

// Learns the distribution of re-access intervals by context, by how often the object was requested,
// and by its last interval, from requests alone; intervals that have not ended are censored (a
// Kaplan-Meier estimate). Few observations are shrunk towards the context, and those of a context
// towards its prior, or the distribution of all requests.
class Learned : public Policy {
 public:
  Learned(int64_t capacity, bool by_bytes, uint64_t seed)
      : Policy(capacity), by_bytes_(by_bytes), random_(seed) {}
  void set_prior(int32_t context, const double *hazard, double strength);

 protected:
  void grow(size_t count) override;
  void hit(const Request &now) override { note(now); }
  void miss(const Request &now) override;
  void seen(const Request &now) override { note(now); }

 private:
  struct Distribution {
    std::vector<double> ended = std::vector<double>(kBins, 0.0);
    std::vector<double> open = std::vector<double>(kBins, 0.0);
    bool seen = false;  // or its ranks are those of its context
  };
  struct Prior {
    std::vector<double> hazard;
    double strength;
  };

  struct Activity {
    int64_t last = 0, longest = 0;  // request, and gap between two
  };

  int32_t class_of(const Request &now, int64_t interval);
  void note(const Request &now);
  void learn();
  // A context is taken to have ended if it was silent four times longer than ever before.
  double rank(int32_t id, int64_t age) const {
    const double density = ranks_[static_cast<size_t>(class_[id]) * kBins + bin_of(age)];
    const Activity &activity = activity_[class_[id] / kFeatures];
    if (clock_ - activity.last > 4 * activity.longest + 64) return 0.0;
    return by_bytes_ ? density : density / static_cast<double>(size_[id] + 1);
  }
  int32_t cheapest();
  void drop(int32_t id);

  const bool by_bytes_;
  std::minstd_rand random_;
  std::vector<int64_t> last_;
  std::vector<int32_t> class_, slots_, slot_of_;
  std::vector<uint8_t> uses_;
  std::vector<Distribution> classes_;
  std::vector<Activity> activity_;
  std::vector<Prior> priors_;
  std::vector<double> ranks_;
  std::vector<int32_t> candidates_;
  int64_t tracked_ = 0, learned_at_ = 0;
  double memory_ = 2e4;  // requests after which an observation has 1 / e of its weight
};

}  // namespace cache
}  // namespace slipstream

#endif  // SLIPSTREAM_CACHE_LEARNED_H_
