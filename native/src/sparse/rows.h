// The distances of some queries to all rows, a tile of rows at a time; compiled once for each
// instruction set by the file that includes it.
//
// For a tile the sums of all queries are made first: columns with many entries from their dense
// blocks, where a block that many queries read stays in the cache; then, query by query, the other
// columns from their inverted lists, scattered into sums that fit into the first-level cache. Each
// pair adds its columns in one order, whatever the tiles and threads: dense first, by column.

#pragma once

#include "exact.h"
#include "ops.h"

namespace {

typedef slipstream_sparse_job Job;

constexpr int kVectorsAtOnce = 8;  // independent sums, to hide the latency of an addition
constexpr int kListChunk = 64;

template <typename T>
constexpr int64_t block_rows() {
  return SLIPSTREAM_SPARSE_BLOCK_BYTES / (int64_t)sizeof(T);
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- sums ---------------------------------------------------------------------------------------

template <typename T, template <typename> class Op>
void head(const Job& job, int channel, int64_t first, int64_t last, int64_t row, int64_t row_end,
          T* sums, int64_t stride) {
  constexpr int W = Lanes<T>::width;
  constexpr int64_t R = block_rows<T>();
  const T* values = static_cast<const T*>(job.head_value[channel]);
  const T* query_aux =
      Op<T>::uses_aux ? static_cast<const T*>(job.head_value_aux[channel]) : values;
  for (int64_t block = row / R; block * R < row_end; ++block) {
    const int64_t base = block * job.head_columns * R;
    const T* dense = static_cast<const T*>(job.head[channel]) + base;
    const T* aux = Op<T>::uses_aux ? static_cast<const T*>(job.head_aux[channel]) + base : dense;
    for (int64_t i = first; i < last; ++i) {
      T* out = sums + (i - first) * stride + (block * R - row);
      for (int64_t part = 0; part < R; part += W * kVectorsAtOnce) {
        Vec<T> sum[kVectorsAtOnce] = {};
        for (int64_t e = job.head_start[i]; e < job.head_start[i + 1]; ++e) {
          const Op<T> op(values[e], query_aux[e], job.power);
          const int64_t at = job.head_column[e] * R + part;
#pragma GCC unroll 8
          for (int n = 0; n < kVectorsAtOnce; ++n)
            sum[n] = op.step(sum[n], load(dense + at + n * W), load(aux + at + n * W));
        }
#pragma GCC unroll 8
        for (int n = 0; n < kVectorsAtOnce; ++n) store(out + part + n * W, sum[n]);
      }
    }
  }
}

// Calls add(row within the tile, term) for every entry that query i shares with the tile's lists.
template <typename T, template <typename> class Op, typename Add>
inline void for_terms(const Job& job, int channel, int64_t i, int64_t tile, Add add) {
  constexpr int W = Lanes<T>::width;
  const T* query = static_cast<const T*>(job.tail_value[channel]);
  const T* query_aux =
      Op<T>::uses_aux ? static_cast<const T*>(job.tail_value_aux[channel]) : query;
  const uint32_t* starts = job.list_start + tile * (job.tail_columns + 1);
  const int64_t base = job.tile_start[tile];
  const T* values = static_cast<const T*>(job.list_value[channel]) + base;
  const T* aux = Op<T>::uses_aux ? static_cast<const T*>(job.list_aux[channel]) + base : values;
  const uint16_t* rows = job.list_row + base;
  for (int64_t e = job.tail_start[i]; e < job.tail_start[i + 1]; ++e) {
    const uint32_t begin = starts[job.tail_column[e]], end = starts[job.tail_column[e] + 1];
    if (begin == end) continue;
    const Op<T> op(query[e], query_aux[e], job.power);
    for (uint32_t p = begin; p < end; p += kListChunk) {
      alignas(kVectorBytes) T terms[kListChunk];
      const int count = (int)least(end - p, kListChunk);
      for (int n = 0; n < count; n += W)
        store(terms + n, op.step(Vec<T>{}, load(values + p + n), load(aux + p + n)));
      for (int n = 0; n < count; ++n) add(rows[p + n], terms[n]);
    }
  }
}

template <typename T, template <typename> class Op>
void tail(const Job& job, int channel, int64_t i, int64_t tile, T* sums) {
  for_terms<T, Op>(job, channel, i, tile, [sums](uint16_t row, T term) { sums[row] += term; });
}

template <typename T, template <typename> class Op>
void accumulate(const Job& job, int channel, int64_t first, int64_t last, int64_t tile, T* sums,
                int64_t stride) {
  const int64_t row = tile * job.tile_rows;
  const int64_t row_end = least(row + job.tile_rows, job.rows);
  // Also without dense columns: it sets the sums to zero.
  head<T, Op>(job, channel, first, last, row, row_end, sums, stride);
  for (int64_t i = first; i < last; ++i)
    tail<T, Op>(job, channel, i, tile, sums + (i - first) * stride);
}

template <typename T>
void accumulate(const Job& job, int channel, int64_t first, int64_t last, int64_t tile, T* sums,
                int64_t stride) {
  switch (job.op[channel]) {
    case SLIPSTREAM_SPARSE_DOT:
      return accumulate<T, Dot>(job, channel, first, last, tile, sums, stride);
    case SLIPSTREAM_SPARSE_MIN:
      return accumulate<T, Min>(job, channel, first, last, tile, sums, stride);
    case SLIPSTREAM_SPARSE_COMMON:
      return accumulate<T, Common>(job, channel, first, last, tile, sums, stride);
    case SLIPSTREAM_SPARSE_SHARE:
      return accumulate<T, Share>(job, channel, first, last, tile, sums, stride);
    case SLIPSTREAM_SPARSE_SHARE_MIN:
      return accumulate<T, ShareMin>(job, channel, first, last, tile, sums, stride);
    case SLIPSTREAM_SPARSE_EQUAL:
      return accumulate<T, Equal>(job, channel, first, last, tile, sums, stride);
    case SLIPSTREAM_SPARSE_POWER:
      if (job.power == 3) return accumulate<T, Cube>(job, channel, first, last, tile, sums, stride);
      return accumulate<T, Power>(job, channel, first, last, tile, sums, stride);
    default:
      return accumulate<T, Entropy>(job, channel, first, last, tile, sums, stride);
  }
}

// ---- from sums to distances ---------------------------------------------------------------------

// One vector of what the sums make, and how large the terms were that cancelled in it.
template <typename T>
struct Finish {
  const Job& job;
  Vec<T> u, c0, c1, c2, limit;
  T u2;

  Finish(const Job& given, int64_t i)
      : job(given), u(splat((T)given.u[i])), c0(splat((T)given.c0)), c1(splat((T)given.c1)),
        c2(splat((T)given.c2)), limit(splat((T)given.near_zero)), u2(0) {
    if (job.finish == SLIPSTREAM_SPARSE_DIVERGENCE) {
      u2 = (T)given.u2[i];
      limit = limit * (T)given.u1[i];
    }
  }

  template <int Kind>
  Vec<T> raw(Vec<T> s, Vec<T> t, Vec<T> v, Bits<T>* cancelled) const {
    if (Kind == SLIPSTREAM_SPARSE_AFFINE) return c0 + c1 * s + c2 * t;
    if (Kind == SLIPSTREAM_SPARSE_SUM) {
      const Vec<T> terms = u + v, x = terms + c1 * s;
      *cancelled |= (Bits<T>)(x < limit * terms);
      return larger(x, Vec<T>{});
    }
    if (Kind == SLIPSTREAM_SPARSE_COSINE) {
      const Vec<T> terms = larger(u, v), x = terms - s;
      *cancelled |= (Bits<T>)(x < limit * terms);
      return larger(x, Vec<T>{});
    }
    if (Kind == SLIPSTREAM_SPARSE_RATIO) {
      const Vec<T> terms = u + v, x = terms + c1 * s, below = terms + c2 * t;
      *cancelled |= (Bits<T>)(x < limit * terms) | (Bits<T>)(below < limit * terms);
      return where_present<T>(below, larger(x, Vec<T>{}) / below);
    }
    if (Kind == SLIPSTREAM_SPARSE_CORRELATION) {
      const Vec<T> means = u * v, x = ((T)1 + means) - s;
      *cancelled |= (Bits<T>)(x < limit * ((T)1 + magnitude<T>(means)));
      // Not larger(): a row without variance has no correlation, and is to stay not a number.
      return (Vec<T>)((Bits<T>)x & ~(Bits<T>)(x < (T)0));
    }
    const Vec<T> x = u + v - s;
    *cancelled |= (Bits<T>)(magnitude<T>(x) < limit);
    const Vec<T> inf = splat((T)__builtin_inf());
    const Bits<T> outside = (Bits<T>)(t < u2);
    return (Vec<T>)(((Bits<T>)x & ~outside) | ((Bits<T>)inf & outside));
  }

  bool is_cancelled(T v, T s, T t) const {
    const T ui = u[0], near = limit[0];
    switch (job.finish) {
      case SLIPSTREAM_SPARSE_SUM:
        return (ui + v) + c1[0] * s < near * (ui + v);
      case SLIPSTREAM_SPARSE_COSINE:
        return (ui > v ? ui : v) - s < near * (ui > v ? ui : v);
      case SLIPSTREAM_SPARSE_RATIO:
        return (ui + v) + c1[0] * s < near * (ui + v) || (ui + v) + c2[0] * t < near * (ui + v);
      case SLIPSTREAM_SPARSE_CORRELATION:
        return ((T)1 + ui * v) - s < near * ((T)1 + (T)absolute((double)(ui * v)));
      case SLIPSTREAM_SPARSE_DIVERGENCE:
        return t >= u2 && (T)absolute((double)(ui + v - s)) < near;
      default:
        return false;
    }
  }

  T finished(double x) const {
    if (job.finish == SLIPSTREAM_SPARSE_SUM) x *= job.c0;
    if (job.root == SLIPSTREAM_SPARSE_SQRT) return (T)__builtin_sqrt(x);
    if (job.root == SLIPSTREAM_SPARSE_POWER_ROOT) return (T)__builtin_pow(x, 1 / job.power);
    return (T)x;
  }

  Vec<T> rooted(Vec<T> x) const {
    if (job.finish == SLIPSTREAM_SPARSE_SUM) x = x * c0;
    if (job.root == SLIPSTREAM_SPARSE_SQRT) return root(x);
    if (job.root == SLIPSTREAM_SPARSE_POWER_ROOT) {
      if (job.power == 3) {
        x = cube_root<T>(x);
      } else {
        for (int n = 0; n < Lanes<T>::width; ++n)
          x[n] = (T)__builtin_pow((double)x[n], 1 / job.power);
      }
    }
    return x;
  }
};

// Distances of query i to `count` rows; row(n) names the n-th one and v[n] is its term. `v`, `s` and
// `t` are read up to whole blocks; `out` may be `s` or `t`.
template <typename T, int Kind, typename Row>
void finish_rows(const Job& job, int64_t i, Row row, int64_t count, const T* v, const T* s,
                 const T* t, T* out) {
  constexpr int W = Lanes<T>::width;
  constexpr int64_t R = block_rows<T>();
  const Finish<T> finish(job, i);
  for (int64_t j = 0; j < count; j += R) {
    Vec<T> made[R / W];
    Bits<T> cancelled = {};
#pragma GCC unroll 8
    for (int n = 0; n < R / W; ++n) {
      const int64_t at = j + n * W;
      made[n] = finish.template raw<Kind>(load(s + at), load(t + at), load(v + at), &cancelled);
    }
    const bool again = job.exact != SLIPSTREAM_SPARSE_NEVER && any(cancelled);
    T anew[R];
    bool is_anew[R];
    if (again) {
      for (int64_t n = 0; n < R; ++n) {
        is_anew[n] = j + n < count && finish.is_cancelled(v[j + n], s[j + n], t[j + n]);
        if (is_anew[n]) anew[n] = finish.finished(exactly<T>(job, i, row(j + n)));
      }
    }
    // The caller's array ends where its rows do.
    T rest[R];
    T* to = j + R <= count ? out + j : rest;
    if (job.root == SLIPSTREAM_SPARSE_PLAIN && job.finish != SLIPSTREAM_SPARSE_SUM) {
      for (int n = 0; n < R / W; ++n) store(to + n * W, made[n]);
    } else {
      for (int n = 0; n < R / W; ++n) store(to + n * W, finish.rooted(made[n]));
    }
    if (to == rest) __builtin_memcpy(out + j, rest, (size_t)(count - j) * sizeof(T));
    if (again)
      for (int64_t n = 0; n < R; ++n)
        if (is_anew[n]) out[j + n] = anew[n];
  }
}

template <typename T, typename Row>
void finish_rows(const Job& job, int64_t i, Row row, int64_t count, const T* v, const T* s,
                 const T* t, T* out) {
  switch (job.finish) {
    case SLIPSTREAM_SPARSE_AFFINE:
      return finish_rows<T, SLIPSTREAM_SPARSE_AFFINE>(job, i, row, count, v, s, t, out);
    case SLIPSTREAM_SPARSE_SUM:
      return finish_rows<T, SLIPSTREAM_SPARSE_SUM>(job, i, row, count, v, s, t, out);
    case SLIPSTREAM_SPARSE_COSINE:
      return finish_rows<T, SLIPSTREAM_SPARSE_COSINE>(job, i, row, count, v, s, t, out);
    case SLIPSTREAM_SPARSE_RATIO:
      return finish_rows<T, SLIPSTREAM_SPARSE_RATIO>(job, i, row, count, v, s, t, out);
    case SLIPSTREAM_SPARSE_CORRELATION:
      return finish_rows<T, SLIPSTREAM_SPARSE_CORRELATION>(job, i, row, count, v, s, t, out);
    default:
      return finish_rows<T, SLIPSTREAM_SPARSE_DIVERGENCE>(job, i, row, count, v, s, t, out);
  }
}

// For each query and tile, in ascending order: distances to where(i, row, sums) says, which may be
// the sums themselves, then made(i, row, count, distances).
template <typename T, typename Where, typename Made>
void for_tiles(const Job& job, int64_t first, int64_t last, void* scratch, Where where, Made made) {
  const int64_t stride = job.tile_rows, queries = last - first;
  // Only dense columns are worth reading once for many queries; the sums of one are in the cache.
  if (job.head_columns == 0 && queries > 1) {
    for (int64_t i = first; i < last; ++i) for_tiles<T>(job, i, i + 1, scratch, where, made);
    return;
  }
  T* s = static_cast<T*>(scratch);
  T* t = job.channels > 1 ? s + queries * stride : s;
  for (int64_t tile = 0; tile * job.tile_rows < job.rows; ++tile) {
    const int64_t row = tile * job.tile_rows;
    const int64_t count = least(job.tile_rows, job.rows - row);
    for (int c = 0; c < job.channels; ++c)
      accumulate<T>(job, c, first, last, tile, c == 0 ? s : t, stride);
    for (int64_t i = first; i < last; ++i) {
      T* sums = s + (i - first) * stride;
      T* out = where(i, row, sums);
      finish_rows<T>(
          job, i, [row](int64_t n) { return row + n; }, count,
          static_cast<const T*>(job.v) + row, sums, t + (i - first) * stride, out);
      made(i, row, count, static_cast<const T*>(out));
    }
  }
}

template <typename T>
void distances(const Job& job, int64_t first, int64_t last, void* scratch, void* out, int64_t ldo) {
  T* to = static_cast<T*>(out);
  for_tiles<T>(
      job, first, last, scratch,
      [&](int64_t i, int64_t row, T*) { return to + (i - first) * ldo + row; },
      [](int64_t, int64_t, int64_t, const T*) {});
}

}  // namespace
