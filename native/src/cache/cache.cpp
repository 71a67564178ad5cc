// The policy that follows the best of several, and the C interface.

#include "slipstream/cache.h"

#include <algorithm>
#include <deque>
#include <new>

#include "cache/learned.h"

namespace slipstream {
namespace cache {
namespace {

// Runs several policies without contents, and evicts what the one with the most hits lately has
// evicted. After a change of policy, contents are replaced when objects are requested, not at once.
class Auto : public Policy {
 public:
  Auto(int64_t capacity, bool by_bytes, uint64_t seed) : Policy(capacity), by_bytes_(by_bytes) {
    for (const int32_t number : {kLru, kS3Fifo, kLirs, kWTinyLfu}) {
      shadows_.push_back({make_classic(number, capacity), number, 0.0});
    }
    auto learned = std::make_unique<Learned>(capacity, by_bytes, seed);
    learned_ = learned.get();
    shadows_.push_back({std::move(learned), kLearned, 0.0});
  }
  int32_t followed() const override { return shadows_[best_].number; }
  Learned &learned() { return *learned_; }

 protected:
  void grow(size_t count) override {
    stale_.resize(count, 0);
    first_size_.resize(count, -1);
  }
  void hit(const Request &now) override { run(sized(now)); }
  void seen(const Request &now) override { run(sized(now)); }
  void miss(const Request &requested) override {
    const Request now = sized(requested);
    run(now);
    if (!shadows_[best_].policy->contains(now.id)) return;
    while (!fits(now.size) && !queue_.empty()) {
      const int32_t id = queue_.front();
      queue_.pop_front();
      stale_[id] = 0;
      if (cached_[id] && !shadows_[best_].policy->contains(id)) evict(id);
    }
    if (fits(now.size)) insert(now);
  }

 private:
  struct Shadow {
    std::unique_ptr<Policy> policy;
    int32_t number;
    double hits;
  };

  // The request with the object's first size, so that all policies count the same bytes.
  Request sized(Request now) {
    if (first_size_[now.id] < 0) first_size_[now.id] = now.size;
    now.size = first_size_[now.id];
    return now;
  }
  void run(const Request &now) {
    const double window = static_cast<double>(std::max<int64_t>(20000, 100 * count_));
    for (Shadow &shadow : shadows_) {
      const bool was = shadow.policy->request(now);
      shadow.hits *= 1.0 - 1.0 / window;
      if (was) shadow.hits += by_bytes_ ? static_cast<double>(now.size) : 1.0;
    }
    for (const int32_t id : shadows_[best_].policy->evicted) mark(id);
    size_t better = best_;
    for (size_t n = 0; n < shadows_.size(); ++n) {
      if (shadows_[n].hits > shadows_[better].hits) better = n;
    }
    // A change replaces contents: it must have gained half a cache of hits to be worth it.
    const double cost = by_bytes_ ? 0.5 * static_cast<double>(used_)
                                  : std::max(20.0, 0.5 * static_cast<double>(count_));
    if (shadows_[better].hits - shadows_[best_].hits <= cost) return;
    best_ = better;
    for (size_t id = 0; id < cached_.size(); ++id) {
      if (cached_[id] && !shadows_[best_].policy->contains(static_cast<int32_t>(id))) {
        mark(static_cast<int32_t>(id));
      }
    }
  }
  void mark(int32_t id) {
    if (!contains(id) || stale_[id]) return;
    stale_[id] = 1;
    queue_.push_back(id);
  }

  const bool by_bytes_;
  std::vector<Shadow> shadows_;
  Learned *learned_;
  size_t best_ = 4;  // learned
  std::vector<uint8_t> stale_;
  std::vector<int64_t> first_size_;
  std::deque<int32_t> queue_;
};

std::unique_ptr<Policy> make(int32_t number, int64_t capacity, bool by_bytes, uint64_t seed) {
  if (number == kLearned) return std::make_unique<Learned>(capacity, by_bytes, seed);
  if (number == kAuto) return std::make_unique<Auto>(capacity, by_bytes, seed);
  return make_classic(number, capacity);
}

Policy *of(void *cache) { return static_cast<Policy *>(cache); }

}  // namespace
}  // namespace cache
}  // namespace slipstream

using namespace slipstream::cache;

extern "C" {

void *slipstream_cache_create(int32_t policy, int64_t capacity, int32_t by_bytes, uint64_t seed) {
  try {
    return make(policy, capacity, by_bytes != 0, seed).release();
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void slipstream_cache_free(void *cache) { delete of(cache); }

int32_t slipstream_cache_request(void *cache, int32_t id, int64_t size, int32_t context) {
  try {
    const bool was = of(cache)->request({id, size, context, kNever});
    return (was ? 1 : 0) | (of(cache)->contains(id) ? 2 : 0);
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

int64_t slipstream_cache_evicted(void *cache, int32_t *out, int64_t room) {
  const std::vector<int32_t> &evicted = of(cache)->evicted;
  const int64_t count = static_cast<int64_t>(evicted.size());
  std::copy(evicted.begin(), evicted.begin() + std::min(count, room), out);
  return count;
}

int32_t slipstream_cache_simulate(void *cache, int64_t count, const int32_t *id,
                                  const int64_t *size, const int32_t *context,
                                  const int64_t *next, uint8_t *hit) {
  Policy *policy = of(cache);
  try {
    for (int64_t n = 0; n < count; ++n) {
      hit[n] = policy->request({id[n], size[n], context == nullptr ? 0 : context[n],
                                next == nullptr ? kNever : next[n]});
    }
  } catch (const std::bad_alloc &) {
    return 3;
  }
  return 0;
}

int32_t slipstream_cache_prior(void *cache, int32_t context, const double *hazard,
                               double strength) {
  Learned *learned = dynamic_cast<Learned *>(of(cache));
  if (auto *following = dynamic_cast<Auto *>(of(cache))) learned = &following->learned();
  if (learned == nullptr || context < 0) return 1;
  try {
    learned->set_prior(context, hazard, strength);
  } catch (const std::bad_alloc &) {
    return 3;
  }
  return 0;
}

int32_t slipstream_cache_followed(void *cache) { return of(cache)->followed(); }

void slipstream_cache_gittins(const double *hazard, double *rank) { gittins(hazard, rank); }

void slipstream_cache_edges(double *edge) { std::copy(edges(), edges() + kBins + 1, edge); }

int64_t slipstream_cache_number(const uint64_t *key, int64_t count, int32_t *id) {
  // Open addressing, at most half full.
  size_t slots = 1024;
  while (slots < 2 * static_cast<size_t>(count)) slots *= 2;
  try {
    std::vector<int32_t> number(slots, -1);
    std::vector<uint64_t> stored(slots);
    int32_t known = 0;
    for (int64_t n = 0; n < count; ++n) {
      uint64_t hash = key[n] * 0x9e3779b97f4a7c15u;
      size_t at = (hash ^ hash >> 32) & (slots - 1);
      while (number[at] >= 0 && stored[at] != key[n]) at = (at + 1) & (slots - 1);
      if (number[at] < 0) {
        number[at] = known++;
        stored[at] = key[n];
      }
      id[n] = number[at];
    }
    return known;
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

}  // extern "C"
