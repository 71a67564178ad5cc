// For any processor: one number at a time.


#include "scan/kernel.h"

namespace slipstream {
namespace scan {
namespace {

template <typename Number>
struct Plain {
  using T = Number;
  using V = Number;
  static constexpr int kWidth = 1, kColumns = 4;
  static V set1(T x) { return x; }
  static V load(const T* p) { return *p; }
  static V load(const T* p, int64_t) { return *p; }
  static void store(T* p, V x) { *p = x; }
  static void store(T* p, V x, int64_t) { *p = x; }
  static V fma(V a, V b, V c) { return a * b + c; }
  // What is not a number stays so, as the second operand.
  static V maximum(V a, V b) { return a > b ? a : b; }
  static V where_positive(V y, V x) { return y > 0 ? x : 0; }

#include "scan/by_element.inc"
};

#include "scan/cells.inc"

}  // namespace

extern const Kernel scan_scalar;
const Kernel scan_scalar = {"scalar", precision<Plain<float>>, precision<Plain<double>>};

}  // namespace scan
}  // namespace slipstream
