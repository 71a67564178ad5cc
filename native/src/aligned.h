// Vectors that begin at a cache line. Numbers given no value have none until they are written: zeros
// would be one more pass over memory, by one thread, and would take lines out of the others' caches.
#pragma once

#include <cstddef>
#include <new>
#include <utility>
#include <vector>

namespace slipstream {

template <typename T>
struct CacheAligned {
  using value_type = T;
  static constexpr std::align_val_t kCacheLine{64};

  CacheAligned() = default;
  template <typename U>
  CacheAligned(const CacheAligned<U> &) {}
  template <typename U>
  void construct(U *at) {
    ::new (static_cast<void *>(at)) U;
  }
  template <typename U, typename... Given>
  void construct(U *at, Given &&...given) {
    ::new (static_cast<void *>(at)) U(std::forward<Given>(given)...);
  }
  T *allocate(std::size_t count) {
    return static_cast<T *>(::operator new(count * sizeof(T), kCacheLine));
  }
  void deallocate(T *memory, std::size_t) { ::operator delete(memory, kCacheLine); }
  template <typename U>
  bool operator==(const CacheAligned<U> &) const {
    return true;
  }
  template <typename U>
  bool operator!=(const CacheAligned<U> &) const {
    return false;
  }
};

template <typename T>
using AlignedVector = std::vector<T, CacheAligned<T>>;

}  // namespace slipstream
