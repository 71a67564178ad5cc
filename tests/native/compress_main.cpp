// Runs every kernel of compressed gradients of a build on random sizes, in arrays exactly as large as
// they must be; for sanitizers. Fails where two kernels differ in a bit.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "slipstream/compress.h"

namespace {

using Numbers = std::vector<float>;
std::mt19937_64 draw(1);

int64_t below(int64_t n) { return static_cast<int64_t>(draw() % static_cast<uint64_t>(n)); }

// Some of them zeros of either sign, alike, tiny or large.
Numbers numbers(int64_t count) {
  std::normal_distribution<float> normal;
  const float odd[] = {0.0f, -0.0f, 1.0f, -1.0f, 1e-30f, 1e-42f, 3e20f};
  Numbers made(static_cast<size_t>(count));
  const bool mixed = below(2) == 0;
  for (float& x : made) x = mixed && below(3) == 0 ? odd[below(7)] : normal(draw);
  return made;
}

// What a kernel made, bit by bit: of all kernels the same.
struct Bits {
  std::vector<uint8_t> bytes;

  template <typename Made>
  void add(const std::vector<Made>& made) {
    const auto* from = reinterpret_cast<const uint8_t*>(made.data());
    bytes.insert(bytes.end(), from, from + made.size() * sizeof(Made));
  }
};

void blocks(int32_t kernel, int32_t bits, const Numbers& gradient, const Numbers& kept,
            const std::vector<int64_t>& length, Bits* bits_made) {
  std::vector<int64_t> offset, position;
  int64_t numbers = 0, bytes = 0;
  for (const int64_t one : length) {
    offset.push_back(numbers);
    position.push_back(bytes);
    numbers += one;
    bytes += (one + 31) / 32 * 4 * bits;
  }
  Numbers residual = kept, scales(length.size());
  std::vector<uint8_t> codes(static_cast<size_t>(bytes));
  const int64_t count = static_cast<int64_t>(length.size());
  slipstream_compress_blocks_encode(kernel, bits, gradient.data(), residual.data(), count,
                                    offset.data(), length.data(), position.data(), scales.data(),
                                    codes.data());
  bits_made->add(residual);
  bits_made->add(scales);
  bits_made->add(codes);
  for (int32_t add = 0; add < 2; ++add) {
    Numbers out = gradient;
    slipstream_compress_blocks_decode(kernel, bits, scales.data(), codes.data(), count,
                                      offset.data(), length.data(), position.data(), 0.5f, add,
                                      out.data());
    bits_made->add(out);
  }
}

void top(int32_t kernel, const Numbers& gradient, const Numbers& kept, int64_t k, Bits* made) {
  Numbers residual = kept, values(static_cast<size_t>(k));
  std::vector<int32_t> indices(static_cast<size_t>(k));
  const int64_t count = static_cast<int64_t>(gradient.size());
  slipstream_compress_top(kernel, gradient.data(), residual.data(), count, k, indices.data(),
                          values.data());
  Numbers out = gradient;
  slipstream_compress_scatter(indices.data(), values.data(), k, 0.5f, out.data(), count);
  for (const auto* one : {&residual, &values, &out}) made->add(*one);
  made->add(indices);
}

void low_rank(int32_t kernel, const Numbers& gradient, const Numbers& kept, const Numbers& start,
              int64_t rows, int64_t columns, int32_t rank, Bits* made) {
  Numbers residual = kept, q = start, p(static_cast<size_t>(rank * rows)), out(gradient.size());
  slipstream_compress_project(kernel, gradient.data(), residual.data(), rows, columns, rank,
                              q.data(), p.data());
  made->add(residual);
  made->add(p);
  slipstream_compress_orthonormalise(kernel, p.data(), rows, rank);
  slipstream_compress_project_back(kernel, residual.data(), rows, columns, rank, p.data(),
                                   q.data());
  slipstream_compress_reconstruct(kernel, p.data(), q.data(), rows, columns, rank, residual.data(),
                                  out.data());
  for (const auto* one : {&p, &q, &residual, &out}) made->add(*one);
}

}  // namespace

int main() {
  for (int round = 0; round < 600; ++round) {
    std::vector<int64_t> length;
    int64_t count = 0;
    for (int64_t left = 1 + below(5); left > 0; --left) {
      length.push_back(1 + below(round % 2 ? 70 : 600));
      count += length.back();
    }
    // Now and then enough for top-k to guess.
    const int64_t many = round % 20 ? count : count + 3000;
    const Numbers gradient = numbers(count), kept = numbers(count);
    const Numbers larger = numbers(many), kept_too = numbers(many);
    const int64_t k = 1 + below(round % 3 ? std::min<int64_t>(many, 20) : many);
    const int64_t rows = 1 + below(20), columns = 1 + below(70);
    const int32_t rank = static_cast<int32_t>(1 + below(9));
    std::normal_distribution<float> normal;
    Numbers matrix(static_cast<size_t>(rows * columns)), rest = matrix;
    Numbers start(static_cast<size_t>(rank * columns));
    for (auto* made : {&matrix, &rest, &start})
      for (float& x : *made) x = normal(draw);
    Numbers broken = gradient;
    const float bad[] = {std::numeric_limits<float>::infinity(), -std::nanf(""), 1.5e30f};
    broken[static_cast<size_t>(below(count))] = bad[round % 3];
    Bits first;
    for (int32_t kernel = 0; kernel < slipstream_compress_kernel_count(); ++kernel) {
      Bits made;
      for (const int32_t bits : {1, 4, 8}) blocks(kernel, bits, gradient, kept, length, &made);
      top(kernel, larger, kept_too, k, &made);
      low_rank(kernel, matrix, rest, start, rows, columns, rank, &made);
      if (!slipstream_compress_finite(kernel, gradient.data(), count) ||
          slipstream_compress_finite(kernel, broken.data(), count)) {
        std::fprintf(stderr, "finite: kernel %d, round %d\n", kernel, round);
        return 1;
      }
      if (kernel == 0) first = made;
      if (made.bytes != first.bytes) {
        std::fprintf(stderr, "bits: kernel %d, round %d\n", kernel, round);
        return 1;
      }
    }
  }
  std::printf("fine\n");
  return 0;
}
