// The kernels, for any vector: the including file defines `Floats`, kWidth numbers of them, with a
// fused multiply-add, and how many vectors of a row of a product stay in registers.
//
// Every number is one chain of fused multiply-adds in the order of the sum: no result depends on the
// width of vectors or on how a product is cut into tiles.

#pragma once

#include <cstdint>

#include "tt/kernel.h"

namespace slipstream {
namespace tt {
namespace {

constexpr int64_t kWidth = Floats::kWidth;
constexpr int kTileRows = 4;
constexpr int kSquareColumns = 4;
constexpr int64_t kSoon = 8;  // ids before an id's slices are used they are fetched
constexpr int kSliceColumns = 4;
constexpr int kSliceVectors = kTileVectors / 2;

// A matrix whose entry (i, k) is at[i * row + k * column].
struct Matrix {
  const float* at;
  int64_t row, column;
};

// Loops of known length unrolled before registers are given out: otherwise sums begin and end in memory.
#define UNROLLED _Pragma("GCC unroll 16") for

template <int kRows, int kVectors>
inline void tile(int64_t depth, const Matrix& a, const float* b, int64_t b_row, float* c,
                 int64_t c_row, bool add) {
  Floats sum[kRows][kVectors];
  UNROLLED(int i = 0; i < kRows; ++i)
    UNROLLED(int v = 0; v < kVectors; ++v)
      sum[i][v] = add ? Floats::load(c + i * c_row + v * kWidth) : Floats::all(0);
  const float* from = a.at;
  for (int64_t k = 0; k < depth; ++k) {
    Floats right[kVectors];
    UNROLLED(int v = 0; v < kVectors; ++v) right[v] = Floats::load(b + v * kWidth);
    UNROLLED(int i = 0; i < kRows; ++i) {
      const Floats left = Floats::all(from[i * a.row]);
      UNROLLED(int v = 0; v < kVectors; ++v) sum[i][v] = left.times_plus(right[v], sum[i][v]);
    }
    from += a.column;
    b += b_row;
  }
  UNROLLED(int i = 0; i < kRows; ++i)
    UNROLLED(int v = 0; v < kVectors; ++v) sum[i][v].store(c + i * c_row + v * kWidth);
}

// turned[r2, stride] of one prefix: the product of its first two slices, transposed. Four columns of
// the middle slice and kWidth / 4 rows of the first make a square of vectors, which is turned before
// it leaves the registers. For shapes of whole squares; see `squares`.
inline void multiply_turned(const Sizes& sizes, const float* first, const float* middle,
                            float* turned, int64_t stride) {
  constexpr int kRows = kWidth / kSquareColumns;
  const int64_t columns = kSquareColumns * sizes.r2;
  for (int64_t i = 0; i < sizes.q1; i += kRows)
    for (int64_t j = 0; j < sizes.r2; j += kWidth) {
      Floats sum[kWidth];
      UNROLLED(int x = 0; x < kWidth; ++x) sum[x] = Floats::all(0);
      const float* a = first + i * sizes.r1;
      const float* b = middle + j;
      for (int64_t k = 0; k < sizes.r1; ++k, ++a, b += columns) {
        Floats right[kSquareColumns];
        UNROLLED(int v = 0; v < kSquareColumns; ++v) right[v] = Floats::load(b + v * sizes.r2);
        UNROLLED(int row = 0; row < kRows; ++row) {
          const Floats left = Floats::all(a[row * sizes.r1]);
          UNROLLED(int v = 0; v < kSquareColumns; ++v)
            sum[row * kSquareColumns + v] =
                left.times_plus(right[v], sum[row * kSquareColumns + v]);
        }
      }
      Floats::transpose(sum);
      UNROLLED(int r = 0; r < kWidth; ++r)
        sum[r].store(turned + (j + r) * stride + i * kSquareColumns);
    }
}

// Whether the products of the first two slices consist of whole squares.
inline bool squares(const Sizes& sizes) {
  return kWidth > kSquareColumns && sizes.q2 == kSquareColumns &&
         sizes.q1 % (kWidth / kSquareColumns) == 0 && sizes.r2 % kWidth == 0;
}

template <int kVectors>
inline void columns_of(int64_t rows, int64_t depth, const Matrix& a, const float* b, int64_t b_row,
                       float* c, int64_t c_row, bool add) {
  constexpr int kRows = kTileRows * kTileVectors / kVectors;  // as many sums, whatever the columns
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    tile<kRows, kVectors>(depth, {a.at + i * a.row, a.row, a.column}, b, b_row, c + i * c_row, c_row,
                          add);
  for (; i < rows; ++i)
    tile<1, kVectors>(depth, {a.at + i * a.row, a.row, a.column}, b, b_row, c + i * c_row, c_row,
                      add);
}

// c (+)= a b: [rows, columns] of [rows, depth] and [depth, columns].
void multiply(int64_t rows, int64_t columns, int64_t depth, const Matrix& a, const float* b,
              int64_t b_row, float* c, int64_t c_row, bool add) {
  int64_t j = 0;
  for (; j + kTileVectors * kWidth <= columns; j += kTileVectors * kWidth)
    columns_of<kTileVectors>(rows, depth, a, b + j, b_row, c + j, c_row, add);
  for (; j + 2 * kWidth <= columns; j += 2 * kWidth)
    columns_of<2>(rows, depth, a, b + j, b_row, c + j, c_row, add);
  for (; j + kWidth <= columns; j += kWidth)
    columns_of<1>(rows, depth, a, b + j, b_row, c + j, c_row, add);
  for (; j < columns; ++j)
    for (int64_t i = 0; i < rows; ++i) {
      float sum = add ? c[i * c_row + j] : 0;
      for (int64_t k = 0; k < depth; ++k)
        sum = __builtin_fmaf(a.at[i * a.row + k * a.column], b[k * b_row + j], sum);
      c[i * c_row + j] = sum;
    }
}

// to[columns, to_row] of from[rows, from_row].
void transpose(int64_t rows, int64_t columns, const float* from, int64_t from_row, float* to,
               int64_t to_row) {
  int64_t i = 0;
  for (; i + kWidth <= rows; i += kWidth) {
    int64_t j = 0;
    for (; j + kWidth <= columns; j += kWidth) {
      Floats square[kWidth];
      UNROLLED(int r = 0; r < kWidth; ++r) square[r] = Floats::load(from + (i + r) * from_row + j);
      Floats::transpose(square);
      UNROLLED(int r = 0; r < kWidth; ++r) square[r].store(to + (j + r) * to_row + i);
    }
    for (; j < columns; ++j)
      for (int64_t r = 0; r < kWidth; ++r) to[j * to_row + i + r] = from[(i + r) * from_row + j];
  }
  for (; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) to[j * to_row + i] = from[i * from_row + j];
}

int64_t rounded_up(int64_t count) { return (count + kWidth - 1) / kWidth * kWidth; }

// kColumns columns from `column` on of a row: y[left, q3] = (left^T)^T G_3, by vectors over left.
template <int kColumns>
inline void project_columns(const Sizes& sizes, const float* left, const float* last,
                            int64_t column, float* y) {
  const int64_t stride = rounded_up(sizes.left);
  for (int64_t begin = 0; begin < sizes.left; begin += kWidth) {
    Floats sum[kColumns];
    for (int c = 0; c < kColumns; ++c) sum[c] = Floats::all(0);
    for (int64_t k = 0; k < sizes.r2; ++k) {
      const Floats x = Floats::load(left + k * stride + begin);
      for (int c = 0; c < kColumns; ++c)
        sum[c] = Floats::all(last[k * sizes.q3 + column + c]).times_plus(x, sum[c]);
    }
    float* const to = y + begin * sizes.q3 + column;
    if (kColumns == 4 && begin + kWidth <= sizes.left) {
      Floats::store_by_fours(sum, to, sizes.q3);
      continue;
    }
    float apart[kColumns][kWidth];
    for (int c = 0; c < kColumns; ++c) sum[c].store(apart[c]);
    for (int64_t i = 0; i < kWidth && begin + i < sizes.left; ++i)
      for (int c = 0; c < kColumns; ++c) to[i * sizes.q3 + c] = apart[c][i];
  }
}

void project(const Sizes& sizes, const float* left, const float* last, float* y) {
  int64_t column = 0;
  for (; column + 4 <= sizes.q3; column += 4) project_columns<4>(sizes, left, last, column, y);
  for (; column < sizes.q3; ++column) project_columns<1>(sizes, left, last, column, y);
}

// Where in `digits` the prefixes that are made together begin: starts[0] to starts[count].
struct Prefixes {
  int64_t count;
  int64_t starts[kTogetherRows + 1];
};

Prefixes prefixes_from(const Digits* digits, int64_t begin, int64_t end, int64_t most) {
  Prefixes found;
  found.count = 0;
  const int64_t middle = digits[begin].middle;
  int64_t u = begin;
  while (u < end && found.count < most && digits[u].middle == middle) {
    found.starts[found.count++] = u;
    const int64_t first = digits[u].first;
    while (u < end && digits[u].middle == middle && digits[u].first == first) ++u;
  }
  found.starts[found.count] = u;
  return found;
}

// The products of the first two slices of prefixes: left[count, q1 q2, r2], and the first slices
// themselves, one under the other.
void multiply_prefixes(const Lookup& lookup, const Sizes& sizes, const Digits* digits,
                       const Prefixes& prefixes, float* firsts, float* left) {
  for (int64_t p = 0; p < prefixes.count; ++p) {
    const float* const slice = lookup.cores[0] + digits[prefixes.starts[p]].first * sizes.first;
    for (int64_t i = 0; i < sizes.first; ++i) firsts[p * sizes.first + i] = slice[i];
  }
  const float* const middle =
      lookup.cores[1] + digits[prefixes.starts[0]].middle * sizes.middle;
  const int64_t columns = sizes.q2 * sizes.r2;
  multiply(prefixes.count * sizes.q1, columns, sizes.r1, {firsts, sizes.r1, 1}, middle, columns,
           left, columns, false);
}

// As `forward`, for shapes of whole squares.
void forward_in_squares(const Lookup& lookup, const Sizes& sizes, const Digits* digits,
                        int64_t first, int64_t last, float* rows, float* turned) {
  for (int64_t u = first; u < last;) {
    const Digits prefix = digits[u];
    multiply_turned(sizes, lookup.cores[0] + prefix.first * sizes.first,
                    lookup.cores[1] + prefix.middle * sizes.middle, turned, sizes.left);
    for (; u < last && digits[u].middle == prefix.middle && digits[u].first == prefix.first; ++u)
      project(sizes, turned, lookup.cores[2] + digits[u].last * sizes.last, rows + u * sizes.dim);
  }
}

void forward(const Lookup& lookup, const Sizes& sizes, const Digits* digits, int64_t first,
             int64_t last, float* rows, float* scratch) {
  if (squares(sizes)) return forward_in_squares(lookup, sizes, digits, first, last, rows, scratch);
  const int64_t stride = rounded_up(sizes.left);
  float* const firsts = scratch;
  float* const left = firsts + sizes.together * sizes.first;
  float* const turned = left + sizes.together * sizes.left * sizes.r2;
  for (int64_t i = 0; i < sizes.r2 * stride; ++i) turned[i] = 0;
  for (int64_t u = first; u < last;) {
    const Prefixes prefixes = prefixes_from(digits, u, last, sizes.together);
    multiply_prefixes(lookup, sizes, digits, prefixes, firsts, left);
    for (int64_t p = 0; p < prefixes.count; ++p) {
      transpose(sizes.left, sizes.r2, left + p * sizes.left * sizes.r2, sizes.r2, turned, stride);
      for (u = prefixes.starts[p]; u < prefixes.starts[p + 1]; ++u)
        project(sizes, turned, lookup.cores[2] + digits[u].last * sizes.last, rows + u * sizes.dim);
    }
  }
}

// What one id's gradient y[left, q3] gives to the product of its first two slices, whose gradient is
// written or added to, and to its transposed slice of the last core: kSliceColumns columns of that
// slice and kSliceVectors vectors of its rows at a time, whose sums stay in registers.
void spread_squares(const Sizes& sizes, const float* y, const float* left, const float* last,
                    float* left_gradient, float* last_gradient, bool add) {
  for (int64_t column = 0; column < sizes.q3; column += kSliceColumns)
    for (int64_t r = 0; r < sizes.r2; r += kSliceVectors * kWidth) {
      const int64_t corner = column * sizes.r2 + r;
      Floats slice[kSliceColumns][kSliceVectors], sum[kSliceColumns][kSliceVectors];
      UNROLLED(int c = 0; c < kSliceColumns; ++c)
        UNROLLED(int v = 0; v < kSliceVectors; ++v) {
          slice[c][v] = Floats::load(last + corner + c * sizes.r2 + v * kWidth);
          sum[c][v] = Floats::load(last_gradient + corner + c * sizes.r2 + v * kWidth);
        }
      for (int64_t i = 0; i < sizes.left; ++i) {
        const int64_t row = i * sizes.r2 + r;
        Floats x[kSliceVectors], made[kSliceVectors];
        UNROLLED(int v = 0; v < kSliceVectors; ++v) {
          x[v] = Floats::load(left + row + v * kWidth);
          made[v] = add || column > 0 ? Floats::load(left_gradient + row + v * kWidth)
                                      : Floats::all(0);
        }
        UNROLLED(int c = 0; c < kSliceColumns; ++c) {
          const Floats given = Floats::all(y[i * sizes.q3 + column + c]);
          UNROLLED(int v = 0; v < kSliceVectors; ++v) {
            made[v] = given.times_plus(slice[c][v], made[v]);
            sum[c][v] = given.times_plus(x[v], sum[c][v]);
          }
        }
        UNROLLED(int v = 0; v < kSliceVectors; ++v) made[v].store(left_gradient + row + v * kWidth);
      }
      UNROLLED(int c = 0; c < kSliceColumns; ++c)
        UNROLLED(int v = 0; v < kSliceVectors; ++v)
          sum[c][v].store(last_gradient + corner + c * sizes.r2 + v * kWidth);
    }
}

// The same for any shape.
void spread(const Sizes& sizes, const float* y, const float* left, const float* last,
            float* left_gradient, float* last_gradient, bool add) {
  if (sizes.q3 % kSliceColumns == 0 && sizes.r2 % (kSliceVectors * kWidth) == 0)
    return spread_squares(sizes, y, left, last, left_gradient, last_gradient, add);
  multiply(sizes.left, sizes.r2, sizes.q3, {y, sizes.q3, 1}, last, sizes.r2, left_gradient,
           sizes.r2, add);
  multiply(sizes.q3, sizes.r2, sizes.left, {y, 1, sizes.q3}, left, sizes.r2, last_gradient,
           sizes.r2, true);
}

void fetch(const float* from, int64_t count) {
  constexpr int64_t kLine = 16;
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(from + i);
}

void add(int64_t dim, float factor, const float* x, float* y) {
  int64_t i = 0;
  const Floats factors = Floats::all(factor);
  for (; i + kWidth <= dim; i += kWidth)
    factors.times_plus(Floats::load(x + i), Floats::load(y + i)).store(y + i);
  for (; i < dim; ++i) y[i] = __builtin_fmaf(factor, x[i], y[i]);
}

void backward(const Lookup& lookup, const Sizes& sizes, const Digits* digits, int64_t first,
              int64_t last, const float* last_turned, const float* row_gradients,
              float* first_gradient, float* middle_gradient, float* last_gradient,
              float* scratch) {
  const int64_t columns = sizes.q2 * sizes.r2, product = sizes.left * sizes.r2;
  float* const firsts = scratch;
  float* const firsts_gradient = firsts + sizes.together * sizes.first;
  float* const left = firsts_gradient + sizes.together * sizes.first;
  float* const left_gradient = left + sizes.together * product;
  float* const middle_turned = left_gradient + sizes.together * product;
  int64_t turned = -1;
  for (int64_t u = first; u < last;) {
    const Prefixes prefixes = prefixes_from(digits, u, last, sizes.together);
    const int64_t middle = digits[u].middle;
    const float* const middle_slice = lookup.cores[1] + middle * sizes.middle;
    if (middle != turned) transpose(sizes.r1, columns, middle_slice, columns, middle_turned, sizes.r1);
    turned = middle;
    multiply_prefixes(lookup, sizes, digits, prefixes, firsts, left);
    for (int64_t p = 0; p < prefixes.count; ++p)
      for (u = prefixes.starts[p]; u < prefixes.starts[p + 1]; ++u) {
        const int64_t slice = digits[u].last * sizes.last;
        if (u + kSoon < last) {
          const Digits& soon = digits[u + kSoon];
          fetch(lookup.cores[0] + soon.first * sizes.first, sizes.first);
          fetch(last_turned + soon.last * sizes.last, sizes.last);
          fetch(last_gradient + soon.last * sizes.last, sizes.last);
        }
        spread(sizes, row_gradients + u * sizes.dim, left + p * product, last_turned + slice,
               left_gradient + p * product, last_gradient + slice, u > prefixes.starts[p]);
      }
    const int64_t rows = prefixes.count * sizes.q1;
    multiply(sizes.r1, columns, rows, {firsts, 1, sizes.r1}, left_gradient, columns,
             middle_gradient + middle * sizes.middle, columns, true);
    multiply(rows, sizes.r1, columns, {left_gradient, columns, 1}, middle_turned, sizes.r1,
             firsts_gradient, sizes.r1, false);
    for (int64_t p = 0; p < prefixes.count; ++p)
      add(sizes.first, 1.0f, firsts_gradient + p * sizes.first,
          first_gradient + digits[prefixes.starts[p]].first * sizes.first);
  }
}

#undef UNROLLED

}  // namespace
}  // namespace tt
}  // namespace slipstream
