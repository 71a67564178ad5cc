// The nearest rows of some queries: all rows tile by tile, or only those that share a column.

#pragma once

#include "rows.h"

namespace {

// The k nearest so far of one query: a heap with the farthest on top, ties by the higher row.
template <typename T>
struct Nearest {
  T* distance;
  int64_t* row;
  int64_t k;

  static bool farther(T a, int64_t i, T b, int64_t j) { return a > b || (a == b && i > j); }

  // Places not yet taken are infinitely far, behind all rows, and must be taken even at infinity.
  void clear() {
    for (int64_t n = 0; n < k; ++n) {
      distance[n] = (T)__builtin_inf();
      row[n] = INT64_MAX;
    }
  }

  bool full() const { return row[0] != INT64_MAX; }

  bool takes(T d, int64_t r) const { return farther(distance[0], row[0], d, r); }

  void offer(T d, int64_t r) {
    if (d != d) d = (T)__builtin_inf();
    if (takes(d, r)) sink(0, k, d, r);
  }

  void sink(int64_t at, int64_t size, T d, int64_t r) {
    for (;;) {
      int64_t child = 2 * at + 1;
      if (child >= size) break;
      if (child + 1 < size &&
          farther(distance[child + 1], row[child + 1], distance[child], row[child]))
        ++child;
      if (!farther(distance[child], row[child], d, r)) break;
      distance[at] = distance[child];
      row[at] = row[child];
      at = child;
    }
    distance[at] = d;
    row[at] = r;
  }

  void sort() {
    for (int64_t size = k - 1; size > 0; --size) {
      const T d = distance[size];
      const int64_t r = row[size];
      distance[size] = distance[0];
      row[size] = row[0];
      sink(0, size, d, r);
    }
  }
};

// ---- all rows -----------------------------------------------------------------------------------

// Offers `count` rows from `row` on; whole blocks of `d` are read.
template <typename T>
void offer_tile(Nearest<T> best, int64_t row, int64_t count, const T* d) {
  constexpr int W = Lanes<T>::width;
  constexpr int64_t R = block_rows<T>();
  for (int64_t j = 0; j < count; j += R) {
    // Rows come in ascending order: one as far as the farthest kept never replaces it. Past the
    // last row of a tile are sums of no row: looked at, never taken.
    if (best.full()) {
      Vec<T> closest = splat((T)__builtin_inf());
#pragma GCC unroll 8
      for (int64_t n = 0; n < R; n += W) closest = smaller(load(d + j + n), closest);
      if (!any((Bits<T>)(closest < splat(best.distance[0])))) continue;
    }
    for (int64_t part = j; part < least(j + R, count); part += W) {
      if (!best.full()) {
        const int64_t end = least(part + W, count);
        for (int64_t n = part; n < end; ++n) best.offer(d[n], row + n);
        continue;
      }
      uint32_t closer = lanes((Bits<T>)(load(d + part) < splat(best.distance[0])));
      for (; closer; closer &= closer - 1) {
        const int64_t n = part + __builtin_ctz(closer);
        if (n < count) best.offer(d[n], row + n);
      }
    }
  }
}

// ---- rows that share a column -------------------------------------------------------------------

// Where few rows share a column with the query and all others are equally far from it, only those
// few are looked at. A sum that nothing was added to is -0, which no addition makes: the first one
// is to +0, and a sum is -0 only where both of its terms are.

// Whether rows without a common column are all at one distance from a query that is not empty.
inline bool others_alike(const Job& job) {
  return job.head_columns == 0 && job.channels == 1 &&
         (job.op[0] == SLIPSTREAM_SPARSE_DOT || job.op[0] == SLIPSTREAM_SPARSE_MIN) &&
         (job.finish == SLIPSTREAM_SPARSE_AFFINE || job.finish == SLIPSTREAM_SPARSE_COSINE ||
          job.finish == SLIPSTREAM_SPARSE_RATIO);
}

// Visiting a row that shares a column costs about as much as this many rows of a sweep.
constexpr int64_t kSweptPerTouched = 4;

inline bool touches_few(const Job& job, int64_t i) {
  if (!(job.u[i] > 0 || job.finish == SLIPSTREAM_SPARSE_AFFINE)) return false;
  int64_t listed = 0;
  for (int64_t tile = 0; tile * job.tile_rows < job.rows; ++tile) {
    const uint32_t* starts = job.list_start + tile * (job.tail_columns + 1);
    for (int64_t e = job.tail_start[i]; e < job.tail_start[i + 1]; ++e)
      listed += starts[job.tail_column[e] + 1] - starts[job.tail_column[e]];
  }
  return listed * kSweptPerTouched < job.rows;
}

template <typename T>
inline bool untouched(T sum) {
  auto bits = Lanes<T>::sign_mask;
  __builtin_memcpy(&bits, &sum, sizeof sum);
  return bits == Lanes<T>::sign_mask;
}

// As tail(), and notes the rows that are added to for the first time; returns how many.
template <typename T, template <typename> class Op>
int64_t touch(const Job& job, int64_t i, int64_t tile, T* sums, uint16_t* touched) {
  int64_t met = 0;
  for_terms<T, Op>(job, 0, i, tile, [&](uint16_t row, T term) {
    const T before = sums[row];
    touched[met] = row;
    met += untouched(before);
    sums[row] = (before + (T)0) + term;
  });
  return met;
}

// Offers rows that share columns with query i, then the lowest of the others until one is refused.
// `sums` are -0 before and afterwards.
template <typename T>
void offer_touched(const Job& job, int64_t i, Nearest<T> best, T* sums, uint16_t* touched) {
  constexpr int64_t R = block_rows<T>();
  const T* terms = static_cast<const T*>(job.v);
  T v[R] = {}, s[R] = {}, d[R];
  for (int64_t tile = 0; tile * job.tile_rows < job.rows; ++tile) {
    const int64_t first = tile * job.tile_rows;
    const int64_t count = least(job.tile_rows, job.rows - first);
    const int64_t met = job.op[0] == SLIPSTREAM_SPARSE_MIN
                            ? touch<T, Min>(job, i, tile, sums, touched)
                            : touch<T, Dot>(job, i, tile, sums, touched);
    for (int64_t from = 0; from < met; from += R) {
      const int64_t some = least(R, met - from);
      const auto row = [&](int64_t n) { return first + touched[from + n]; };
      for (int64_t n = 0; n < some; ++n) {
        v[n] = terms[row(n)];
        s[n] = sums[touched[from + n]];
      }
      finish_rows<T>(job, i, row, some, v, s, s, d);
      for (int64_t n = 0; n < some; ++n) best.offer(d[n], row(n));
    }
    for (int64_t n = 0; n < R; ++n) s[n] = 0;
    finish_rows<T>(job, i, [&](int64_t) { return first; }, 1, terms + first, s, s, d);
    for (int64_t n = 0; n < count; ++n) {
      if (!untouched(sums[n])) continue;
      if (!best.takes(d[0], first + n)) break;
      best.offer(d[0], first + n);
    }
    for (int64_t n = 0; n < met; ++n) sums[touched[n]] = -(T)0;
  }
}

// ---- both ---------------------------------------------------------------------------------------

template <typename T>
void nearest(const Job& job, int64_t first, int64_t last, int64_t k, void* scratch,
             void* out_distance, int64_t* out_row) {
  const auto best = [&](int64_t i) {
    const int64_t at = (i - first) * k;
    return Nearest<T>{static_cast<T*>(out_distance) + at, out_row + at, k};
  };
  const auto sweep = [&](int64_t begin, int64_t end) {
    for_tiles<T>(
        job, begin, end, scratch, [](int64_t, int64_t, T* sums) { return sums; },
        [&](int64_t i, int64_t row, int64_t count, const T* d) {
          offer_tile(best(i), row, count, d);
        });
  };
  for (int64_t i = first; i < last; ++i) best(i).clear();
  if (!others_alike(job)) {
    sweep(first, last);
  } else {
    T* sums = static_cast<T*>(scratch);
    uint16_t* touched = reinterpret_cast<uint16_t*>(sums + job.tile_rows);
    bool clean = false;
    for (int64_t i = first; i < last; ++i) {
      if (!touches_few(job, i)) {
        sweep(i, i + 1);
        clean = false;
        continue;
      }
      if (!clean)
        for (int64_t n = 0; n < job.tile_rows; ++n) sums[n] = -(T)0;
      clean = true;
      offer_touched(job, i, best(i), sums, touched);
    }
  }
  for (int64_t i = first; i < last; ++i) best(i).sort();
}

}  // namespace
