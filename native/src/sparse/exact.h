// A distance that nearly cancelled, computed again from the two rows; see slipstream_sparse_exact.

#pragma once

#include "slipstream/sparse.h"

namespace {

inline double absolute(double a) { return __builtin_fabs(a); }

inline double relative(double a, double b, double smoothing) {
  const double whole = a + smoothing;
  return whole > 0 ? whole * __builtin_log(whole / (b + smoothing)) : 0;
}

inline double half_entropy(double a, double b) {
  return a > 0 ? a * __builtin_log(2 * a / (a + b)) : 0;
}

inline double over(double sum, double below) {
  return below > 0 ? sum / below : sum > 0 ? __builtin_inf() : 0;
}

// Calls term(a, b) for every column of the union.
template <typename T, typename Term>
inline int64_t for_union(const slipstream_sparse_rows& a, int64_t i,
                         const slipstream_sparse_rows& b, int64_t j, Term term) {
  const T* av = static_cast<const T*>(a.value);
  const T* bv = static_cast<const T*>(b.value);
  int64_t p = a.indptr[i], q = b.indptr[j], columns = 0;
  const int64_t p_end = a.indptr[i + 1], q_end = b.indptr[j + 1];
  while (p < p_end || q < q_end) {
    const int32_t ca = p < p_end ? a.column[p] : INT32_MAX;
    const int32_t cb = q < q_end ? b.column[q] : INT32_MAX;
    term(ca <= cb ? (double)av[p] : 0.0, cb <= ca ? (double)bv[q] : 0.0);
    p += ca <= cb;
    q += cb <= ca;
    ++columns;
  }
  return columns;
}

// What takes the place of the sum that cancelled, before scale and root.
template <typename T>
double exactly(const slipstream_sparse_job& job, int64_t i, int64_t j) {
  double sum = 0, below = 0;
  const auto& a = job.exact_a;
  const auto& b = job.exact_b;
  switch (job.exact) {
    case SLIPSTREAM_SPARSE_ABSOLUTE:
      for_union<T>(a, i, b, j, [&](double x, double y) { sum += absolute(x - y); });
      return sum;
    case SLIPSTREAM_SPARSE_SQUARED:
      for_union<T>(a, i, b, j, [&](double x, double y) { sum += (x - y) * (x - y); });
      return job.c3 * sum;
    case SLIPSTREAM_SPARSE_POWERS:
      for_union<T>(a, i, b, j, [&](double x, double y) {
        sum += __builtin_pow(absolute(x - y), job.power);
      });
      return sum;
    case SLIPSTREAM_SPARSE_SHARES:
      for_union<T>(a, i, b, j, [&](double x, double y) {
        sum += absolute(x - y) / (absolute(x) + absolute(y));
      });
      return sum;
    case SLIPSTREAM_SPARSE_ENTROPIES:
      for_union<T>(a, i, b, j, [&](double x, double y) {
        sum += half_entropy(x, y) + half_entropy(y, x);
      });
      return sum;
    case SLIPSTREAM_SPARSE_RELATIVE:
      for_union<T>(a, i, b, j, [&](double x, double y) { sum += relative(x, y, job.c3); });
      return sum;
    case SLIPSTREAM_SPARSE_CENTRED: {
      const double mean_a = (double)(T)job.u1[i];
      const double mean_b = (double)static_cast<const T*>(job.v)[j];
      const double shift = mean_a - mean_b;
      const int64_t columns = for_union<T>(a, i, b, j, [&](double x, double y) {
        sum += (x - y - shift) * (x - y - shift);
      });
      return 0.5 * (sum + (job.columns - (double)columns) * shift * shift);
    }
    case SLIPSTREAM_SPARSE_OVER_MAXIMA:
      for_union<T>(a, i, b, j, [&](double x, double y) {
        sum += absolute(x - y);
        below += x > y ? x : y;
      });
      return over(sum, below);
    case SLIPSTREAM_SPARSE_OVER_SUMS:
      for_union<T>(a, i, b, j, [&](double x, double y) {
        sum += absolute(x - y);
        below += absolute(x + y);
      });
      return over(sum, below);
    default:
      return 0;
  }
}

}  // namespace
