// Runs every Adasum kernel of a build on random layers, in arrays exactly as large as they must be;
// for sanitizers. Fails where two kernels differ in a bit.

#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "slipstream/adasum.h"

namespace {

std::mt19937_64 draw(1);

int64_t below(int64_t n) { return static_cast<int64_t>(draw() % static_cast<uint64_t>(n)); }

// Products and combination of every kernel; whether all have the same bits.
template <typename Number>
bool alike(int32_t dtype, int64_t workers, const std::vector<int64_t>& starts) {
  const int64_t layers = static_cast<int64_t>(starts.size()) - 1;
  const auto count = static_cast<size_t>(starts.back());
  std::normal_distribution<Number> normal;
  std::vector<std::vector<Number>> rows(static_cast<size_t>(workers), std::vector<Number>(count));
  std::vector<double> weights(static_cast<size_t>(layers * workers));
  for (auto& row : rows)
    for (Number& x : row) x = normal(draw);
  for (double& weight : weights) weight = static_cast<double>(normal(draw));
  std::vector<double> first;
  std::vector<Number> first_out;
  for (int32_t kernel = 0; kernel < slipstream_adasum_kernel_count(); ++kernel) {
    std::vector<const void*> from;
    for (const auto& row : rows) from.push_back(row.data());
    std::vector<double> products(static_cast<size_t>(layers * workers * workers));
    if (slipstream_adasum_products(kernel, dtype, from.data(), workers, starts.data(), layers,
                                   products.data()))
      return false;
    // The result may be in the place of a row.
    std::vector<Number> out = rows[0];
    from[0] = out.data();
    if (slipstream_adasum_combine(kernel, dtype, from.data(), workers, starts.data(), layers,
                                  weights.data(), out.data()))
      return false;
    if (kernel == 0) {
      first = products;
      first_out = out;
    }
    if (std::memcmp(products.data(), first.data(), products.size() * sizeof(double)) ||
        (count && std::memcmp(out.data(), first_out.data(), count * sizeof(Number))))
      return false;
  }
  return true;
}

}  // namespace

int main() {
  for (int round = 0; round < 600; ++round) {
    std::vector<int64_t> starts = {0};
    for (int64_t left = 1 + below(6); left > 0; --left)
      starts.push_back(starts.back() + below(round % 2 ? 40 : 400));
    const int64_t workers = 1 + below(9);
    if (!alike<float>(SLIPSTREAM_ADASUM_FLOAT32, workers, starts) ||
        !alike<double>(SLIPSTREAM_ADASUM_FLOAT64, workers, starts)) {
      std::fprintf(stderr, "bits: round %d\n", round);
      return 1;
    }
  }
  std::printf("fine\n");
  return 0;
}
