// The largest |a - b| over all columns.
//
// A maximum cannot be undone, so the identity for sums does not apply. Instead entries are tried
// from the largest |value| on, of both rows in turn: a column whose values are both below what was
// found (below half of it, where signs differ) cannot be farther apart. On sparse rows a pair takes
// a few looks.

#include "kernel.h"

namespace {

double magnitude_of(double a) { return a < 0 ? -a : a; }

// The value of row j in a column, 0 where it has none.
double value_at(const slipstream_sparse_rows& rows, int64_t j, int32_t column) {
  int64_t low = rows.indptr[j], high = rows.indptr[j + 1];
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (rows.column[middle] < column)
      low = middle + 1;
    else
      high = middle;
  }
  const bool found = low < rows.indptr[j + 1] && rows.column[low] == column;
  return found ? static_cast<const double*>(rows.value)[low] : 0;
}

}  // namespace

void slipstream::sparse::chebyshev(const slipstream_sparse_chebyshev_job& job, int64_t first,
                                   int64_t last, double* scratch, double* out, int64_t ldo) {
  const slipstream_sparse_rows &a = job.a, &b = job.b;
  const double *av = static_cast<const double*>(a.value), *bv = static_cast<const double*>(b.value);
  const double share = job.non_negative ? 1 : 0.5;
  for (int64_t i = first; i < last; ++i) {
    for (int64_t p = a.indptr[i]; p < a.indptr[i + 1]; ++p) scratch[a.column[p]] = av[p];
    for (int64_t j = 0; j < b.rows; ++j) {
      double most = 0;
      for (int64_t n = b.indptr[j]; n < b.indptr[j + 1]; ++n) {
        const int64_t q = b.indptr[j] + job.order_b[n];
        if (magnitude_of(bv[q]) <= share * most) break;
        const double d = magnitude_of(bv[q] - scratch[b.column[q]]);
        if (d > most) most = d;
      }
      for (int64_t n = a.indptr[i]; n < a.indptr[i + 1]; ++n) {
        const int64_t p = a.indptr[i] + job.order_a[n];
        if (magnitude_of(av[p]) <= share * most) break;
        const double d = magnitude_of(av[p] - value_at(b, j, a.column[p]));
        if (d > most) most = d;
      }
      out[(i - first) * ldo + j] = most;
    }
    for (int64_t p = a.indptr[i]; p < a.indptr[i + 1]; ++p) scratch[a.column[p]] = 0;
  }
}
