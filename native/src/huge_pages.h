// Vectors for large data that is read sequentially, such as weights.
//
// If the system supports it (Linux, unless transparent huge pages are off), their memory has pages
// of 2 MiB instead of 4 KiB. The CPU's prefetchers stop at the end of a page, and each page needs
// another look-up, in a virtual machine in two tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace slipstream {

// Memory that begins at a cache line at least.
template <typename T>
struct HugePaged {
  using value_type = T;
  static constexpr std::size_t kPage = std::size_t{2} << 20;
  static constexpr std::align_val_t kCacheLine{64};

  HugePaged() = default;
  template <typename U>
  HugePaged(const HugePaged<U> &) {}

  T *allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
#if defined(__linux__)
    if (bytes >= kPage) return static_cast<T *>(map(bytes));
#endif
    return static_cast<T *>(::operator new(bytes, kCacheLine));
  }

  void deallocate(T *memory, std::size_t count) {
#if defined(__linux__)
    if (count * sizeof(T) >= kPage) return (void)munmap(memory, whole(count * sizeof(T)));
#endif
    ::operator delete(memory, kCacheLine);
  }

  template <typename U>
  bool operator==(const HugePaged<U> &) const {
    return true;
  }
  template <typename U>
  bool operator!=(const HugePaged<U> &) const {
    return false;
  }

 private:
#if defined(__linux__)
  static std::size_t whole(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  // Not from the heap, whose reused memory is already in small pages.
  static void *map(std::size_t bytes) {
    void *made = mmap(nullptr, whole(bytes) + kPage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) throw std::bad_alloc();
    char *begin = static_cast<char *>(made);
    const std::size_t beyond = reinterpret_cast<std::uintptr_t>(begin) % kPage;
    const std::size_t before = beyond ? kPage - beyond : 0;
    if (before) munmap(begin, before);
    munmap(begin + before + whole(bytes), kPage - before);
    // Not the last page unless it is full: nothing takes more memory than it needs. A refusal
    // changes nothing.
    (void)madvise(begin + before, bytes / kPage * kPage, MADV_HUGEPAGE);
    return begin + before;
  }
#endif
};

template <typename T>
using HugePagedVector = std::vector<T, HugePaged<T>>;

}  // namespace slipstream
