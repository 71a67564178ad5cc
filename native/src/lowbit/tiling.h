// How a product is cut into tiles whose height the compiler knows.
//
// Everything is in an unnamed namespace: files that include this are compiled for different
// processors, and the linker must not merge their copies.

#pragma once

#include <cstdint>
#include <type_traits>

namespace slipstream {
namespace lowbit {
namespace {

constexpr int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }
constexpr int64_t round_up(int64_t n, int64_t to) { return divide_up(n, to) * to; }

// Rows in blocks of at most `most`, as equal as they can be: 13 rows of 12 are 7 + 6, not 12 + 1.
class RowBlocks {
 public:
  RowBlocks(int64_t rows, int64_t most)
      : count_(divide_up(rows, most)), least_(rows / count_), larger_(rows % count_) {}

  int64_t count() const { return count_; }
  int64_t rows(int64_t block) const { return least_ + (block < larger_); }
  int64_t first(int64_t block) const {
    return block * least_ + (block < larger_ ? block : larger_);
  }

 private:
  int64_t count_, least_, larger_;
};

// f(std::integral_constant<int, n>) for an n in Least..Most that is known only now.
template <int Least, int Most, typename F>
inline void with_constant(int64_t n, const F& f) {
  if constexpr (Least < Most) {
    if (n < Most) return with_constant<Least, Most - 1>(n, f);
  }
  f(std::integral_constant<int, Most>{});
}

}  // namespace
}  // namespace lowbit
}  // namespace slipstream
