/* Distances between the rows of sparse matrices: a plain C ABI.
 *
 * Every distance that is a sum over columns is computed from the columns that two rows share:
 *
 *     sum over A u B of f(a, b)
 *       = sum over A of f(a, 0) + sum over B of f(0, b)
 *       + sum over A n B of (f(a, b) - f(a, 0) - f(0, b))
 *
 * The first two are one number a row (`u`, `v`); the kernels accumulate the third, finish the
 * distance and, where cancellation would show, compute it again from the two rows.
 *
 * Values are float32 or float64, as `is_double` says. Arrays belong to the caller and are only read
 * during the call, unless the name says `out` or `scratch`. No function throws or keeps state.
 */
#ifndef SLIPSTREAM_SPARSE_H
#define SLIPSTREAM_SPARSE_H

#include <stdint.h>

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised by one whenever a function or a struct member changes meaning. */
#define SLIPSTREAM_SPARSE_ABI 1

/* Rows of the dense head lie in blocks of this many bytes a column. */
#define SLIPSTREAM_SPARSE_BLOCK_BYTES 512
/* List values must be readable this many bytes past their end. */
#define SLIPSTREAM_SPARSE_PADDING_BYTES 512

/* What is summed over the columns two rows share; x is the query's value, b the other. */
enum slipstream_sparse_op {
  SLIPSTREAM_SPARSE_DOT = 0,     /* x b */
  SLIPSTREAM_SPARSE_MIN = 1,     /* min(x, b), for x, b >= 0 */
  SLIPSTREAM_SPARSE_COMMON = 2,  /* min(|x|, |b|) where the signs agree, else 0 */
  SLIPSTREAM_SPARSE_SHARE = 3,   /* -1 - 2 common(x, b) / (|x| + |b|) */
  SLIPSTREAM_SPARSE_EQUAL = 4,   /* -1 - [x = b] */
  SLIPSTREAM_SPARSE_POWER = 5,   /* |x - b|^p - |x|^p - |b|^p */
  SLIPSTREAM_SPARSE_ENTROPY = 6, /* x ln x + b ln b - (x + b) ln(x + b) */
  SLIPSTREAM_SPARSE_SHARE_MIN = 7 /* -1 - 2 min(x, b) / (x + b), for x, b >= 0 */
};

/* How sums become a distance; s and t are the sums of the two channels. */
enum slipstream_sparse_finish {
  SLIPSTREAM_SPARSE_AFFINE = 0,      /* c0 + c1 s + c2 t */
  SLIPSTREAM_SPARSE_SUM = 1,         /* root(c0 max(0, u + v + c1 s)) */
  SLIPSTREAM_SPARSE_COSINE = 2,      /* max(0, max(u, v) - s) */
  SLIPSTREAM_SPARSE_RATIO = 3,       /* (u + v + c1 s) / (u + v + c2 t), 0 / 0 = 0 */
  SLIPSTREAM_SPARSE_CORRELATION = 4, /* max(0, 1 - s + u v) */
  SLIPSTREAM_SPARSE_DIVERGENCE = 5   /* u + v - s; +inf where t < u2 */
};

enum slipstream_sparse_root {
  SLIPSTREAM_SPARSE_PLAIN = 0,
  SLIPSTREAM_SPARSE_SQRT = 1,
  SLIPSTREAM_SPARSE_POWER_ROOT = 2 /* to the power 1 / p */
};

/* What a distance that nearly cancelled is computed from again, row against row. */
enum slipstream_sparse_exact {
  SLIPSTREAM_SPARSE_NEVER = 0,
  SLIPSTREAM_SPARSE_ABSOLUTE = 1,       /* sum |a - b| */
  SLIPSTREAM_SPARSE_SQUARED = 2,        /* c3 sum (a - b)^2 */
  SLIPSTREAM_SPARSE_POWERS = 3,         /* sum |a - b|^p */
  SLIPSTREAM_SPARSE_SHARES = 4,         /* sum |a - b| / (|a| + |b|) */
  SLIPSTREAM_SPARSE_ENTROPIES = 5,      /* sum a ln(2a / (a+b)) + b ln(2b / (a+b)) */
  SLIPSTREAM_SPARSE_RELATIVE = 6,       /* sum a ln(a / (b + c3)) */
  SLIPSTREAM_SPARSE_CENTRED = 7,        /* 1/2 sum over all columns (a - u1 - b + v)^2 */
  SLIPSTREAM_SPARSE_OVER_MAXIMA = 8,    /* sum |a - b| / sum max(a, b) */
  SLIPSTREAM_SPARSE_OVER_SUMS = 9       /* sum |a - b| / sum |a + b| */
};

typedef struct slipstream_sparse_rows {
  int64_t rows;
  const int64_t *indptr;   /* [rows + 1] */
  const int32_t *column;   /* ascending within a row */
  const void *value;
} slipstream_sparse_rows;

typedef struct slipstream_sparse_job {
  uint64_t struct_bytes;
  int32_t is_double;
  int32_t channels;      /* 1 or 2 */
  int32_t op[2];
  int32_t finish;
  int32_t root;
  int32_t exact;
  int32_t reserved;
  double c0, c1, c2, c3;
  double power;          /* p */
  double columns;        /* k */
  double near_zero;      /* computed again below this share of the terms that cancel */

  /* B: `rows` of them in tiles of `tile_rows`, by columns. Columns with many entries are dense,
   * head[(block * head_columns + column) * block_rows + row]; the others are inverted lists. */
  int64_t rows, tile_rows;
  int64_t head_columns, tail_columns;
  const void *head[2], *head_aux[2];
  const int64_t *tile_start;  /* [tiles + 1]; where a tile's lists begin */
  const uint32_t *list_start; /* [tiles, tail_columns + 1]; from the tile's beginning on */
  const uint16_t *list_row;   /* within the tile */
  const void *list_value[2], *list_aux[2];
  const void *v;              /* [rows] */

  /* A: the queries, their columns named as in B. */
  int64_t queries;
  const int64_t *head_start, *tail_start; /* [queries + 1] */
  const int32_t *head_column, *tail_column;
  const void *head_value[2], *tail_value[2];
  const void *head_value_aux[2], *tail_value_aux[2];
  /* [queries]; u1: of a divergence what cancels, of a correlation the mean; u2: entries. */
  const double *u, *u1, *u2;

  slipstream_sparse_rows exact_a, exact_b;
} slipstream_sparse_job;

SLIPSTREAM_API int32_t slipstream_sparse_abi(void);

/* Which instruction set the kernels would use: 0 baseline, 1 AVX2, 2 AVX-512; not above `highest`. */
SLIPSTREAM_API int32_t slipstream_sparse_level(int32_t highest);

/* Bytes of scratch for `queries` at a time. */
SLIPSTREAM_API int64_t slipstream_sparse_scratch_bytes(const slipstream_sparse_job *job,
                                                       int64_t queries);

/* Which queries, and how they are shared by threads. */
typedef struct slipstream_sparse_calls {
  uint64_t struct_bytes;
  int32_t level;          /* highest instruction set to use */
  int32_t threads;
  int64_t base;           /* the query that `out` begins with */
  int64_t count;
  const int64_t *ranges;  /* [count, 2]; first and last + 1 of queries computed at a time */
  int64_t scratch_bytes;  /* of one thread: for the longest range */
  void *scratch;          /* [threads * scratch_bytes] */
} slipstream_sparse_calls;

/* Distances of the queries to all rows: out[i - base][j], row stride ldo. */
SLIPSTREAM_API int32_t slipstream_sparse_distances(const slipstream_sparse_job *job,
                                                   const slipstream_sparse_calls *calls, void *out,
                                                   int64_t ldo);

/* The k nearest rows of the queries, by distance, then by row; a distance that is not a number
 * counts as infinite. out_distance, out_row: [queries, k], from `base` on; k <= rows. */
SLIPSTREAM_API int32_t slipstream_sparse_nearest(const slipstream_sparse_job *job,
                                                 const slipstream_sparse_calls *calls, int64_t k,
                                                 void *out_distance, int64_t *out_row);

/* The largest |a - b| over all columns. Values are float64; order_a and order_b name the entries of
 * each row, the largest |value| first, counted from the row's beginning. */
typedef struct slipstream_sparse_chebyshev_job {
  uint64_t struct_bytes;
  int32_t non_negative; /* whether no value is below zero */
  int32_t reserved;
  slipstream_sparse_rows a, b;
  const int32_t *order_a, *order_b;
} slipstream_sparse_chebyshev_job;

/* scratch of a thread: one zero for each column; zero again afterwards. out[i - base][j]. */
SLIPSTREAM_API int32_t slipstream_sparse_chebyshev(const slipstream_sparse_chebyshev_job *job,
                                                   const slipstream_sparse_calls *calls,
                                                   double *out, int64_t ldo);

#ifdef __cplusplus
}
#endif

#endif
