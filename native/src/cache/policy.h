// Cache policies over objects that are numbered from 0: what a simulation and a cache share.

#ifndef SLIPSTREAM_CACHE_POLICY_H_
#define SLIPSTREAM_CACHE_POLICY_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace slipstream {
namespace cache {

constexpr int kBins = 64;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

struct Request {
  int32_t id;
  int64_t size;
  int32_t context;
  int64_t next;  // number of the object's next request, or kNever; read by Belady only
};

// Neighbours in a list; an object is in one list of those that share them.
struct Links {
  std::vector<int32_t> before, after;
  void grow(size_t count) {
    before.resize(count, -1);
    after.resize(count, -1);
  }
};

class List {
 public:
  explicit List(Links &links) : links_(&links) {}
  int32_t front() const { return front_; }
  int32_t back() const { return back_; }
  int32_t before(int32_t id) const { return links_->before[id]; }
  bool empty() const { return front_ < 0; }
  void push_front(int32_t id) {
    links_->before[id] = -1;
    links_->after[id] = front_;
    (front_ < 0 ? back_ : links_->before[front_]) = id;
    front_ = id;
  }
  void remove(int32_t id) {
    const int32_t before = links_->before[id], after = links_->after[id];
    (before < 0 ? front_ : links_->after[before]) = after;
    (after < 0 ? back_ : links_->before[after]) = before;
  }
  int32_t pop_back() {
    const int32_t id = back_;
    remove(id);
    return id;
  }

 private:
  Links *links_;
  int32_t front_ = -1, back_ = -1;
};

class Policy {
 public:
  explicit Policy(int64_t capacity) : capacity_(capacity) {}
  virtual ~Policy() = default;

  // Returns whether the object was cached. An object keeps the size it was inserted with.
  bool request(const Request &now) {
    if (static_cast<size_t>(now.id) >= size_.size()) {
      const size_t count = std::max<size_t>(now.id + 1, 2 * size_.size());
      size_.resize(count, 0);
      cached_.resize(count, 0);
      grow(count);
    }
    evicted.clear();
    ++clock_;
    const bool was = cached_[now.id] != 0;
    if (was) {
      hit(now);
    } else if (now.size <= capacity_) {
      miss(now);
    } else {
      seen(now);
    }
    return was;
  }
  bool contains(int32_t id) const {
    return static_cast<size_t>(id) < cached_.size() && cached_[id] != 0;
  }
  virtual int32_t followed() const { return -1; }

  // Objects evicted by the last request.
  std::vector<int32_t> evicted;

 protected:
  virtual void grow(size_t count) = 0;
  virtual void hit(const Request &now) = 0;
  virtual void miss(const Request &now) = 0;
  virtual void seen(const Request &) {}  // an object that is larger than the cache

  bool fits(int64_t size) const { return used_ + size <= capacity_; }
  void insert(const Request &now) {
    size_[now.id] = now.size;
    cached_[now.id] = 1;
    used_ += now.size;
    ++count_;
  }
  void evict(int32_t id) {
    cached_[id] = 0;
    used_ -= size_[id];
    --count_;
    evicted.push_back(id);
  }

  const int64_t capacity_;
  int64_t used_ = 0, count_ = 0, clock_ = 0;
  std::vector<int64_t> size_;
  std::vector<uint8_t> cached_;
};

enum Number { kLru, kFifo, kSieve, kS3Fifo, kLirs, kWTinyLfu, kBelady, kLearned, kAuto };

// Null for an unknown number.
std::unique_ptr<Policy> make_classic(int32_t number, int64_t capacity);
std::unique_ptr<Policy> make_auto(int64_t capacity, bool by_bytes, uint64_t seed);

}  // namespace cache
}  // namespace slipstream

#endif  // SLIPSTREAM_CACHE_POLICY_H_
