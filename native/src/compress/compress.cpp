// Which kernels this build has, and the door to them.

#include "slipstream/compress.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <new>
#include <vector>

#include "compress/kernel.h"

namespace slipstream {
namespace compress {

#define KERNELS "compress_kernels.inc"
#include "registry.inc"

namespace {

// Number of cache lines of gradient + residual from which the threshold is estimated.
constexpr int64_t kSampledLines = 2048;

// Threshold that about k magnitudes exceed, rather more than fewer.
float guess(const float* gradient, const float* residual, int64_t count, int64_t k) {
  const int64_t lines = std::min(kSampledLines, count / kLanes);
  if (lines < 64) return 0.0f;
  std::vector<float> sample(static_cast<size_t>(lines * kLanes));
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t from = line * (count / lines);
    for (int64_t lane = 0; lane < kLanes; ++lane)
      sample[static_cast<size_t>(line * kLanes + lane)] =
          std::abs(gradient[from + lane] + residual[from + lane]);
  }
  const double share = static_cast<double>(k) / static_cast<double>(count);
  const double expected = share * static_cast<double>(sample.size());
  // Four standard deviations, were numbers of a line unlike each other; their kinship doubles it.
  const int64_t rank = static_cast<int64_t>(expected + 8.0 * std::sqrt(expected) + 4.0);
  if (rank >= static_cast<int64_t>(sample.size())) return 0.0f;
  std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), std::greater<float>());
  return sample[static_cast<size_t>(rank)];
}

struct Candidates {
  std::vector<int32_t> indices;
  std::vector<float> values;

  explicit Candidates(int64_t capacity)
      : indices(static_cast<size_t>(capacity)), values(static_cast<size_t>(capacity)) {}
};

// The k largest of the candidates, in order; they become zero in the residual.
void take(const Candidates& candidates, int64_t found, int64_t k, float* residual, int32_t* indices,
          float* values) {
  std::vector<float> sizes(static_cast<size_t>(found));
  for (int64_t i = 0; i < found; ++i)
    sizes[static_cast<size_t>(i)] = std::abs(candidates.values[static_cast<size_t>(i)]);
  std::nth_element(sizes.begin(), sizes.begin() + (k - 1), sizes.end(), std::greater<float>());
  const float least = sizes[static_cast<size_t>(k - 1)];
  int64_t larger = 0;
  for (int64_t i = 0; i < k; ++i) larger += sizes[static_cast<size_t>(i)] > least;
  int64_t equals = k - larger, taken = 0;
  for (int64_t i = 0; i < found && taken < k; ++i) {
    const float value = candidates.values[static_cast<size_t>(i)], size = std::abs(value);
    if (size < least || (size == least && equals-- <= 0)) continue;
    const int32_t index = candidates.indices[static_cast<size_t>(i)];
    indices[taken] = index;
    values[taken++] = value;
    residual[index] = 0.0f;
  }
}

void top(const Kernel& kernel, const float* gradient, float* residual, int64_t count, int64_t k,
         int32_t* indices, float* values) {
  const float threshold = guess(gradient, residual, count, k);
  int64_t capacity = threshold > 0.0f ? std::min(count, 4 * k + 4096) : count;
  Candidates candidates(capacity);
  int64_t found = kernel.above(gradient, residual, count, threshold, capacity,
                               candidates.indices.data(), candidates.values.data());
  if (found < k || found > capacity) {
    // A poor estimate: too high, or nearly all values are equal. Then all are candidates.
    capacity = count;
    candidates = Candidates(capacity);
    found = kernel.above(nullptr, residual, count, 0.0f, capacity, candidates.indices.data(),
                         candidates.values.data());
  }
  take(candidates, found, k, residual, indices, values);
}

}  // namespace
}  // namespace compress
}  // namespace slipstream

using namespace slipstream::compress;

extern "C" {

int32_t slipstream_compress_kernel_count(void) { return kCount; }

const char* slipstream_compress_level(int32_t kernel) {
  return known(kernel) ? kKernels[kernel]->level : "";
}

int32_t slipstream_compress_finite(int32_t kernel, const float* x, int64_t count) {
  return known(kernel) && kKernels[kernel]->finite(x, count);
}

int32_t slipstream_compress_blocks_encode(int32_t kernel, int32_t bits, const float* gradient,
                                          float* residual, int64_t blocks, const int64_t* offset,
                                          const int64_t* length, const int64_t* position,
                                          float* scales, uint8_t* codes) {
  if (!known(kernel) || (bits != 1 && bits != 4 && bits != 8)) return SLIPSTREAM_INVALID;
  const Kernel& table = *kKernels[kernel];
  const auto encode =
      bits == 1 ? table.encode_signs : bits == 4 ? table.encode_nibbles : table.encode_bytes;
  for (int64_t b = 0; b < blocks; ++b)
    scales[b] = encode({length[b], gradient + offset[b], residual + offset[b],
                        codes + position[b]});
  return SLIPSTREAM_OK;
}

int32_t slipstream_compress_blocks_decode(int32_t kernel, int32_t bits, const float* scales,
                                          const uint8_t* codes, int64_t blocks,
                                          const int64_t* offset, const int64_t* length,
                                          const int64_t* position, float weight, int32_t add,
                                          float* out) {
  if (!known(kernel) || (bits != 1 && bits != 4 && bits != 8)) return SLIPSTREAM_INVALID;
  const Kernel& table = *kKernels[kernel];
  const auto decode =
      bits == 1 ? table.decode_signs : bits == 4 ? table.decode_nibbles : table.decode_bytes;
  for (int64_t b = 0; b < blocks; ++b)
    decode(codes + position[b], scales[b] * weight, length[b], add != 0, out + offset[b]);
  return SLIPSTREAM_OK;
}

int32_t slipstream_compress_top(int32_t kernel, const float* gradient, float* residual,
                                int64_t count, int64_t k, int32_t* indices, float* values) {
  if (!known(kernel) || k < 1 || k > count || count > INT32_MAX) return SLIPSTREAM_INVALID;
  try {
    top(*kKernels[kernel], gradient, residual, count, k, indices, values);
  } catch (const std::bad_alloc&) {
    return SLIPSTREAM_NO_MEMORY;
  }
  return SLIPSTREAM_OK;
}

int32_t slipstream_compress_scatter(const int32_t* indices, const float* values, int64_t k,
                                    float weight, float* out, int64_t count) {
  for (int64_t i = 0; i < k; ++i) {
    if (indices[i] < 0 || indices[i] >= count) return SLIPSTREAM_INVALID;
    out[indices[i]] += values[i] * weight;
  }
  return SLIPSTREAM_OK;
}

int32_t slipstream_compress_project(int32_t kernel, const float* gradient, float* residual,
                                    int64_t rows, int64_t columns, int32_t rank, const float* q,
                                    float* p) {
  if (!known(kernel) || rows < 0 || columns < 0 || rank < 1) return SLIPSTREAM_INVALID;
  kKernels[kernel]->project(gradient, residual, rows, columns, rank, q, p);
  return SLIPSTREAM_OK;
}

int32_t slipstream_compress_orthonormalise(int32_t kernel, float* p, int64_t rows, int32_t rank) {
  if (!known(kernel) || rows < 0 || rank < 1) return SLIPSTREAM_INVALID;
  kKernels[kernel]->orthonormalise(p, rows, rank);
  return SLIPSTREAM_OK;
}

int32_t slipstream_compress_project_back(int32_t kernel, const float* residual, int64_t rows,
                                         int64_t columns, int32_t rank, const float* p, float* q) {
  if (!known(kernel) || rows < 0 || columns < 0 || rank < 1) return SLIPSTREAM_INVALID;
  kKernels[kernel]->project_back(residual, rows, columns, rank, p, q);
  return SLIPSTREAM_OK;
}

int32_t slipstream_compress_reconstruct(int32_t kernel, const float* p, const float* q,
                                        int64_t rows, int64_t columns, int32_t rank,
                                        float* residual, float* out) {
  if (!known(kernel) || rows < 0 || columns < 0 || rank < 1) return SLIPSTREAM_INVALID;
  kKernels[kernel]->reconstruct(p, q, rows, columns, rank, residual, out);
  return SLIPSTREAM_OK;
}

}  // extern "C"
