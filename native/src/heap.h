// Four-ary heaps on flat vectors: shallower than binary ones, so fewer cache lines per operation.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "aligned.h"

namespace slipstream {

__extension__ typedef unsigned __int128 Key;

// Smallest key first. Keys are distinct, so the order of removal does not depend on the order of
// insertion. `Item` has a member function `key()`, compared without branches: which child is the
// least cannot be predicted, and a wrong guess costs more than the whole level.
template <typename Item>
class Heap {
 public:
  bool empty() const { return items_.size() <= kPadding; }
  const Item &top() const { return items_[kPadding]; }
  std::size_t size() const { return empty() ? 0 : items_.size() - kPadding; }

  void clear() { items_.clear(); }

  // Drops what `keep` does not hold for.
  template <typename Keep>
  void filter(Keep keep) {
    AlignedVector<Item> all;
    all.swap(items_);
    for (std::size_t i = kPadding; i < all.size(); ++i)
      if (keep(all[i])) push(all[i]);
  }

  void push(const Item &item) {
    if (items_.empty()) items_.resize(kPadding);
    items_.push_back(item);
    Item *heap = items_.data() + kPadding;
    std::size_t hole = items_.size() - kPadding - 1;
    while (hole > 0) {
      const std::size_t parent = (hole - 1) / 4;
      if (!(item.key() < heap[parent].key())) break;
      heap[hole] = heap[parent];
      hole = parent;
    }
    heap[hole] = item;
  }

  void pop() {
    const Item item = items_.back();
    items_.pop_back();
    const std::size_t count = items_.size() - kPadding;
    if (count == 0) return;
    Item *heap = items_.data() + kPadding;
    std::size_t hole = 0;
    for (;;) {
      const std::size_t child = 4 * hole + 1;
      if (child >= count) break;
      const std::size_t least = child + 4 <= count ? least_of_four(heap, child)
                                                   : least_of(heap, child, count);
      if (!(heap[least].key() < item.key())) break;
      heap[hole] = heap[least];
      hole = least;
    }
    heap[hole] = item;
  }

 private:
  // The four children of a node begin at 4 h + 1: with three items in front, every family of
  // 16-byte items fills one cache line.
  static constexpr std::size_t kPadding = 3;
  static constexpr std::size_t kPrefetchFrom = 2048;

  std::size_t least_of_four(const Item *heap, std::size_t child) const {
    if (items_.size() > kPrefetchFrom) {
      // The families of all four, one of which comes next.
      const char *next = reinterpret_cast<const char *>(heap + 4 * child + 1);
      for (std::size_t line = 0; line < 4; ++line)
        __builtin_prefetch(next + line * 4 * sizeof(Item));
    }
    const std::size_t low = child + (heap[child + 1].key() < heap[child].key());
    const std::size_t high = child + 2 + (heap[child + 3].key() < heap[child + 2].key());
    return heap[high].key() < heap[low].key() ? high : low;
  }

  static std::size_t least_of(const Item *heap, std::size_t child, std::size_t end) {
    std::size_t least = child;
    for (std::size_t c = child + 1; c < end; ++c)
      if (heap[c].key() < heap[least].key()) least = c;
    return least;
  }

  AlignedVector<Item> items_;
};

// Times are never negative, so their bits compare as they do.
inline uint64_t time_bits(double time_ns) {
  uint64_t bits;
  std::memcpy(&bits, &time_ns, sizeof bits);
  return bits;
}

// (priority, ready, instance) as one 128-bit number: one comparison instead of three.
inline Key make_key(int32_t priority, double ready_ns, int32_t instance) {
  const uint32_t shifted = static_cast<uint32_t>(priority) ^ 0x80000000u;
  return static_cast<Key>(shifted) << 96 | static_cast<Key>(time_bits(ready_ns)) << 32 |
         static_cast<uint32_t>(instance);
}

inline int32_t key_instance(Key key) { return static_cast<int32_t>(static_cast<uint32_t>(key)); }

struct Ready {
  Key value;
  Key key() const { return value; }
};

}  // namespace slipstream
