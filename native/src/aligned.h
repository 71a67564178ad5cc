// Vectors that begin at a cache line.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace slipstream {

template <typename T>
struct CacheAligned {
  using value_type = T;
  static constexpr std::align_val_t kCacheLine{64};

  CacheAligned() = default;
  template <typename U>
  CacheAligned(const CacheAligned<U> &) {}
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
