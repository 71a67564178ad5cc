// PowerSGD's products of a large matrix with a few vectors, in one pass over memory each.

#pragma once

#include <cmath>

#include "compress/vectors.h"
#include "products.h"

namespace slipstream {
namespace compress {
namespace {

constexpr int64_t kTile = 4;  // rows, and vectors, whose sums stay in registers
// Rows of a projection: only the widest registers hold the sums of more than one.
constexpr int64_t kRows = kParts == 1 ? kTile : 1;
// A vector that loses all but this share of its length depends on those before it.
constexpr double kDependent = 1e-5;

// p[k][i..] for ROWS rows from `i` on and VECTORS vectors; the first vectors' turn adds the
// gradient.
template <int ROWS, int VECTORS>
inline void project_tile(const float* gradient, float* residual, int64_t rows, int64_t columns,
                         int64_t i, const float* q, float* p) {
  Floats sums[ROWS][VECTORS] = {};
  for (int64_t j = 0; j < columns; j += kLanes) {
    const int64_t left = columns - j;
    Floats vectors[VECTORS];
    for (int k = 0; k < VECTORS; ++k) vectors[k] = load(q + k * columns + j, left);
    for (int row = 0; row < ROWS; ++row) {
      const int64_t at = (i + row) * columns + j;
      Floats value = load(residual + at, left);
      if (gradient) {
        value += load(gradient + at, left);
        store(value, residual + at, left);
      }
      for (int k = 0; k < VECTORS; ++k) sums[row][k] += value * vectors[k];
    }
  }
  for (int row = 0; row < ROWS; ++row)
    for (int k = 0; k < VECTORS; ++k) p[k * rows + i + row] = sum_of(sums[row][k]);
}

template <int ROWS>
inline void project_rows(const float* gradient, float* residual, int64_t rows, int64_t columns,
                         int64_t i, int32_t rank, const float* q, float* p) {
  int32_t k = 0;
  for (; k + kTile <= rank; k += kTile, gradient = nullptr)
    project_tile<ROWS, kTile>(gradient, residual, rows, columns, i, q + k * columns, p + k * rows);
  for (; k < rank; ++k, gradient = nullptr)
    project_tile<ROWS, 1>(gradient, residual, rows, columns, i, q + k * columns, p + k * rows);
}

void project(const float* gradient, float* residual, int64_t rows, int64_t columns, int32_t rank,
             const float* q, float* p) {
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    project_rows<kRows>(gradient, residual, rows, columns, i, rank, q, p);
  for (; i < rows; ++i) project_rows<1>(gradient, residual, rows, columns, i, rank, q, p);
}

template <int ROWS, int VECTORS>
inline void back_tile(const float* residual, int64_t rows, int64_t columns, int64_t i,
                      const float* p, float* q) {
  float weights[ROWS][VECTORS];
  for (int row = 0; row < ROWS; ++row)
    for (int k = 0; k < VECTORS; ++k) weights[row][k] = p[k * rows + i + row];
  for (int64_t j = 0; j < columns; j += kLanes) {
    const int64_t left = columns - j;
    Floats sums[VECTORS];
    for (int k = 0; k < VECTORS; ++k) sums[k] = load(q + k * columns + j, left);
    for (int row = 0; row < ROWS; ++row) {
      const Floats value = load(residual + (i + row) * columns + j, left);
      for (int k = 0; k < VECTORS; ++k) sums[k] += value * weights[row][k];
    }
    for (int k = 0; k < VECTORS; ++k) store(sums[k], q + k * columns + j, left);
  }
}

template <int ROWS>
inline void back_rows(const float* residual, int64_t rows, int64_t columns, int64_t i, int32_t rank,
                      const float* p, float* q) {
  int32_t k = 0;
  for (; k + kTile <= rank; k += kTile)
    back_tile<ROWS, kTile>(residual, rows, columns, i, p + k * rows, q + k * columns);
  for (; k < rank; ++k)
    back_tile<ROWS, 1>(residual, rows, columns, i, p + k * rows, q + k * columns);
}

void project_back(const float* residual, int64_t rows, int64_t columns, int32_t rank,
                  const float* p, float* q) {
  std::memset(q, 0, static_cast<size_t>(rank * columns) * sizeof *q);
  int64_t i = 0;
  for (; i + kTile <= rows; i += kTile) back_rows<kTile>(residual, rows, columns, i, rank, p, q);
  for (; i < rows; ++i) back_rows<1>(residual, rows, columns, i, rank, p, q);
}

// out's part of VECTORS vectors for ROWS rows; the last vectors' turn takes the sum off the
// residual.
template <int ROWS, int VECTORS>
inline void reconstruct_tile(const float* p, const float* q, int64_t rows, int64_t columns,
                             int64_t i, bool first, bool last, float* residual, float* out) {
  float weights[ROWS][VECTORS];
  for (int row = 0; row < ROWS; ++row)
    for (int k = 0; k < VECTORS; ++k) weights[row][k] = p[k * rows + i + row];
  for (int64_t j = 0; j < columns; j += kLanes) {
    const int64_t left = columns - j;
    Floats vectors[VECTORS];
    for (int k = 0; k < VECTORS; ++k) vectors[k] = load(q + k * columns + j, left);
    for (int row = 0; row < ROWS; ++row) {
      const int64_t at = (i + row) * columns + j;
      Floats sum = first ? Floats{} : load(out + at, left);
      for (int k = 0; k < VECTORS; ++k) sum += vectors[k] * weights[row][k];
      store(sum, out + at, left);
      if (last) store(load(residual + at, left) - sum, residual + at, left);
    }
  }
}

template <int ROWS>
inline void reconstruct_rows(const float* p, const float* q, int64_t rows, int64_t columns,
                             int64_t i, int32_t rank, float* residual, float* out) {
  int32_t k = 0;
  for (; k + kTile <= rank; k += kTile)
    reconstruct_tile<ROWS, kTile>(p + k * rows, q + k * columns, rows, columns, i, k == 0,
                                  k + kTile == rank, residual, out);
  for (; k < rank; ++k)
    reconstruct_tile<ROWS, 1>(p + k * rows, q + k * columns, rows, columns, i, k == 0,
                              k + 1 == rank, residual, out);
}

void reconstruct(const float* p, const float* q, int64_t rows, int64_t columns, int32_t rank,
                 float* residual, float* out) {
  int64_t i = 0;
  for (; i + kTile <= rows; i += kTile)
    reconstruct_rows<kTile>(p, q, rows, columns, i, rank, residual, out);
  for (; i < rows; ++i) reconstruct_rows<1>(p, q, rows, columns, i, rank, residual, out);
}

inline double dot(const float* a, const float* b, int64_t count) {
  double sums[kLanes] = {};
  add_products(a, b, count, sums);
  return sum_of(sums);
}

// Gram and Schmidt, each vector twice, which is enough (Giraud et al., 2005).
void orthonormalise(float* p, int64_t rows, int32_t rank) {
  for (int32_t k = 0; k < rank; ++k) {
    float* vector = p + k * rows;
    const double before = std::sqrt(dot(vector, vector, rows));
    for (int turn = 0; turn < 2; ++turn)
      for (int32_t other = 0; other < k; ++other) {
        const float* known = p + other * rows;
        const float share = static_cast<float>(dot(vector, known, rows));
        for (int64_t i = 0; i < rows; ++i) vector[i] -= share * known[i];
      }
    const double after = std::sqrt(dot(vector, vector, rows));
    const float factor = after > kDependent * before ? static_cast<float>(1.0 / after) : 0.0f;
    for (int64_t i = 0; i < rows; ++i) vector[i] *= factor;
  }
}

}  // namespace
}  // namespace compress
}  // namespace slipstream
