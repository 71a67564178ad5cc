// LRU, FIFO, SIEVE, S3-FIFO, LIRS, W-TinyLFU and Belady's policy.

#include <algorithm>
#include <queue>
#include <utility>

#include "cache/policy.h"

namespace slipstream {
namespace cache {
namespace {

// Evicts the object that was inserted (FIFO) or requested (LRU) first.
class Queue : public Policy {
 public:
  Queue(int64_t capacity, bool promote) : Policy(capacity), list_(links_), promote_(promote) {}

 protected:
  void grow(size_t count) override { links_.grow(count); }
  void hit(const Request &now) override {
    if (!promote_) return;
    list_.remove(now.id);
    list_.push_front(now.id);
  }
  void miss(const Request &now) override {
    while (!fits(now.size)) evict(list_.pop_back());
    insert(now);
    list_.push_front(now.id);
  }

 private:
  Links links_;
  List list_;
  const bool promote_;
};

// Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024.
class Sieve : public Policy {
 public:
  explicit Sieve(int64_t capacity) : Policy(capacity), list_(links_) {}

 protected:
  void grow(size_t count) override {
    links_.grow(count);
    visited_.resize(count, 0);
  }
  void hit(const Request &now) override { visited_[now.id] = 1; }
  void miss(const Request &now) override {
    while (!fits(now.size)) {
      int32_t id = hand_ < 0 ? list_.back() : hand_;
      while (visited_[id]) {
        visited_[id] = 0;
        id = list_.before(id) < 0 ? list_.back() : list_.before(id);
      }
      hand_ = list_.before(id);
      list_.remove(id);
      evict(id);
    }
    insert(now);
    list_.push_front(now.id);
    visited_[now.id] = 0;
  }

 private:
  Links links_;
  List list_;
  std::vector<uint8_t> visited_;
  int32_t hand_ = -1;
};

// Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, with the insertion into
// the main queue until the first eviction that libCacheSim uses.
class S3Fifo : public Policy {
 public:
  explicit S3Fifo(int64_t capacity)
      : Policy(capacity), small_(links_), main_(links_), ghost_(links_), room_(capacity / 10) {}

 protected:
  enum Place : uint8_t { kNowhere, kSmall, kMain, kGhost };

  void grow(size_t count) override {
    links_.grow(count);
    place_.resize(count, kNowhere);
    uses_.resize(count, 0);
  }
  void hit(const Request &now) override { uses_[now.id] = std::min(uses_[now.id] + 1, 3); }
  void miss(const Request &now) override {
    const int32_t id = now.id;
    const bool known = place_[id] == kGhost;
    if (known) {
      ghost_.remove(id);
      ghost_bytes_ -= size_[id];
      place_[id] = kNowhere;
    }
    // One that fills the small queue would evict everything in it.
    if (now.size > room_ || (!known && now.size == room_ && now.size > 1)) return;
    while (!fits(now.size)) {
      full_ = true;
      if (used_ - small_bytes_ > capacity_ - room_ || small_.empty()) {
        evict_main();
      } else {
        evict_small();
      }
    }
    insert(now);
    uses_[id] = 0;
    if (known || (!full_ && small_bytes_ >= room_)) {
      place_[id] = kMain;
      main_.push_front(id);
    } else {
      place_[id] = kSmall;
      small_.push_front(id);
      small_bytes_ += now.size;
    }
  }

 private:
  void evict_small() {
    while (!small_.empty()) {
      const int32_t id = small_.pop_back();
      small_bytes_ -= size_[id];
      if (uses_[id] >= 2) {
        uses_[id] = 0;
        place_[id] = kMain;
        main_.push_front(id);
        continue;
      }
      evict(id);
      const int64_t most = capacity_ - room_;
      place_[id] = kNowhere;
      if (size_[id] > most) return;
      while (ghost_bytes_ + size_[id] > most) {
        const int32_t old = ghost_.pop_back();
        place_[old] = kNowhere;
        ghost_bytes_ -= size_[old];
      }
      place_[id] = kGhost;
      ghost_.push_front(id);
      ghost_bytes_ += size_[id];
      return;
    }
  }
  void evict_main() {
    while (!main_.empty()) {
      const int32_t id = main_.pop_back();
      if (uses_[id] == 0) {
        place_[id] = kNowhere;
        evict(id);
        return;
      }
      --uses_[id];
      main_.push_front(id);
    }
  }

  Links links_;
  List small_, main_, ghost_;
  const int64_t room_;
  int64_t small_bytes_ = 0, ghost_bytes_ = 0;
  bool full_ = false;
  std::vector<uint8_t> place_;
  std::vector<int> uses_;
};

// Jiang and Zhang, "LIRS: an efficient low inter-reference recency set replacement policy",
// SIGMETRICS 2002. As in libCacheSim, objects larger than the queue's 1 % are admitted only if they
// are in the stack; of evicted objects, at most the capacity is remembered.
class Lirs : public Policy {
 public:
  explicit Lirs(int64_t capacity)
      : Policy(capacity), stack_(stack_links_), queue_(queue_links_), gone_(gone_links_),
        hir_room_(std::max<int64_t>(1, capacity / 100)), lir_room_(capacity - hir_room_) {}

 protected:
  void grow(size_t count) override {
    stack_links_.grow(count);
    queue_links_.grow(count);
    gone_links_.grow(count);
    lir_.resize(count, 0);
    stacked_.resize(count, 0);
  }
  void hit(const Request &now) override {
    const int32_t id = now.id;
    const bool was_stacked = to_top(id);
    if (lir_[id]) {
      prune();
      return;
    }
    queue_.remove(id);
    if (was_stacked && size_[id] <= lir_room_) {
      hir_bytes_ -= size_[id];
      promote(id);
    } else {
      queue_.push_front(id);
    }
  }
  void miss(const Request &now) override {
    const int32_t id = now.id;
    const bool fits_lir = lir_bytes_ + now.size <= lir_room_;
    if (now.size > lir_room_ || (!stacked_[id] && now.size > hir_room_)) return;
    if (stacked_[id]) {
      gone_.remove(id);
      gone_bytes_ -= size_[id];
    }
    const bool was_stacked = to_top(id);
    insert(now);
    if (was_stacked || fits_lir) {
      promote(id);
    } else {
      to_queue(id);
    }
    while (gone_bytes_ > capacity_) {
      const int32_t old = gone_.pop_back();
      gone_bytes_ -= size_[old];
      stack_.remove(old);
      stacked_[old] = 0;
    }
  }

 private:
  // Returns whether the object was in the stack.
  bool to_top(int32_t id) {
    const bool was_stacked = stacked_[id] != 0;
    if (was_stacked) stack_.remove(id);
    stack_.push_front(id);
    stacked_[id] = 1;
    return was_stacked;
  }
  // Makes the object at the top of the stack LIR, and those at the bottom HIR to make room.
  void promote(int32_t id) {
    while (lir_bytes_ + size_[id] > lir_room_) {
      prune();
      const int32_t old = stack_.pop_back();
      stacked_[old] = lir_[old] = 0;
      lir_bytes_ -= size_[old];
      if (size_[old] <= hir_room_) {
        to_queue(old);
      } else {
        evict(old);
      }
    }
    lir_[id] = 1;
    lir_bytes_ += size_[id];
    prune();
  }
  void to_queue(int32_t id) {
    while (hir_bytes_ + size_[id] > hir_room_) {
      const int32_t old = queue_.pop_back();
      hir_bytes_ -= size_[old];
      evict(old);
      if (!stacked_[old]) continue;
      gone_.push_front(old);
      gone_bytes_ += size_[old];
    }
    hir_bytes_ += size_[id];
    queue_.push_front(id);
  }
  void prune() {
    while (!stack_.empty() && !lir_[stack_.back()] && stack_.back() != stack_.front()) {
      const int32_t id = stack_.pop_back();
      stacked_[id] = 0;
      if (cached_[id]) continue;
      gone_.remove(id);
      gone_bytes_ -= size_[id];
    }
  }

  Links stack_links_, queue_links_, gone_links_;
  List stack_, queue_, gone_;
  const int64_t hir_room_, lir_room_;
  int64_t lir_bytes_ = 0, hir_bytes_ = 0, gone_bytes_ = 0;
  std::vector<uint8_t> lir_, stacked_;
};

// Einziger, Friedman and Manes, "TinyLFU", TOS 2017: a window of 1 %, then a segmented LRU. Since
// objects are numbered, frequencies are counted exactly (to 15, and halved), not in a sketch.
class WTinyLfu : public Policy {
 public:
  explicit WTinyLfu(int64_t capacity)
      : Policy(capacity), window_(links_), probation_(links_), protected_(links_),
        window_room_(std::max<int64_t>(1, capacity / 100)) {}

 protected:
  enum Segment : uint8_t { kWindow, kProbation, kProtected };

  void grow(size_t count) override {
    links_.grow(count);
    segment_.resize(count, kWindow);
    uses_.resize(count, 0);
    halved_.resize(count, 0);
  }
  void seen(const Request &now) override { count_use(now.id); }
  void hit(const Request &now) override {
    const int32_t id = now.id;
    count_use(id);
    if (segment_[id] == kWindow) {
      window_.remove(id);
      window_.push_front(id);
      return;
    }
    (segment_[id] == kProbation ? probation_ : protected_).remove(id);
    if (segment_[id] == kProbation) protected_bytes_ += size_[id];
    segment_[id] = kProtected;
    protected_.push_front(id);
    while (protected_bytes_ > (capacity_ - window_room_) / 10 * 8) {
      const int32_t old = protected_.pop_back();
      protected_bytes_ -= size_[old];
      segment_[old] = kProbation;
      probation_.push_front(old);
    }
  }
  void miss(const Request &now) override {
    count_use(now.id);
    insert(now);
    segment_[now.id] = kWindow;
    window_.push_front(now.id);
    window_bytes_ += now.size;
    while (window_bytes_ > window_room_) {
      const int32_t id = window_.pop_back();
      window_bytes_ -= size_[id];
      admit(id);
    }
  }

 private:
  // Keeps `id` if it was used more often than everything that has to be evicted for it.
  void admit(int32_t id) {
    while (used_ - window_bytes_ > capacity_ - window_room_) {
      List &segment = probation_.empty() ? protected_ : probation_;
      if (segment.empty() || uses(id) <= uses(segment.back())) {
        evict(id);
        return;
      }
      const int32_t victim = segment.pop_back();
      if (segment_[victim] == kProtected) protected_bytes_ -= size_[victim];
      evict(victim);
    }
    segment_[id] = kProbation;
    probation_.push_front(id);
  }
  int uses(int32_t id) {
    const int32_t halvings = std::min(halvings_ - halved_[id], 8);
    halved_[id] = halvings_;
    return uses_[id] = static_cast<uint8_t>(uses_[id] >> halvings);
  }
  void count_use(int32_t id) {
    uses_[id] = static_cast<uint8_t>(std::min(uses(id) + 1, 15));
    if (++counted_ >= 10 * std::max<int64_t>(count_, 16)) {
      counted_ /= 2;
      ++halvings_;
    }
  }

  Links links_;
  List window_, probation_, protected_;
  const int64_t window_room_;
  int64_t window_bytes_ = 0, protected_bytes_ = 0, counted_ = 0;
  int32_t halvings_ = 0;
  std::vector<uint8_t> segment_, uses_;
  std::vector<int32_t> halved_;
};

// Evicts the object whose next request is farthest away.
class Belady : public Policy {
 public:
  using Policy::Policy;

 protected:
  void grow(size_t count) override { next_.resize(count, 0); }
  void hit(const Request &now) override { note(now); }
  void miss(const Request &now) override {
    while (!fits(now.size)) {
      const auto [next, id] = order_.top();
      order_.pop();
      if (cached_[id] && next_[id] == next) evict(id);
    }
    insert(now);
    note(now);
  }

 private:
  void note(const Request &now) {
    next_[now.id] = now.next;
    order_.emplace(now.next, now.id);
  }
  std::vector<int64_t> next_;
  std::priority_queue<std::pair<int64_t, int32_t>> order_;
};

}  // namespace

std::unique_ptr<Policy> make_classic(int32_t number, int64_t capacity) {
  switch (number) {
    case kLru: return std::make_unique<Queue>(capacity, true);
    case kFifo: return std::make_unique<Queue>(capacity, false);
    case kSieve: return std::make_unique<Sieve>(capacity);
    case kS3Fifo: return std::make_unique<S3Fifo>(capacity);
    case kLirs: return std::make_unique<Lirs>(capacity);
    case kWTinyLfu: return std::make_unique<WTinyLfu>(capacity);
    case kBelady: return std::make_unique<Belady>(capacity);
    default: return nullptr;
  }
}

}  // namespace cache
}  // namespace slipstream
