// Runs every dropout kernel of a build on numbers from standard input; for processors that Python is
// not installed for, and under sanitizers.
//
//     dropout_main DTYPE COUNT KEY UPPER THRESHOLD SCALE THREADS < x > y of each kernel, in turn
//
// The kernels' levels go to standard error, one on a line.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "slipstream/dropout.h"

int main(int argc, char** argv) {
  if (argc != 8) return 2;
  const int32_t dtype = std::atoi(argv[1]);
  const int64_t count = std::atoll(argv[2]);
  const uint64_t seed[2] = {std::strtoull(argv[3], nullptr, 10), std::strtoull(argv[4], nullptr, 10)};
  const uint32_t threshold = static_cast<uint32_t>(std::strtoul(argv[5], nullptr, 10));
  const float scale = std::strtof(argv[6], nullptr);
  const size_t bytes = static_cast<size_t>(count) * (dtype == SLIPSTREAM_FLOAT32 ? 4 : 2);
  // Exactly as large as they are, so that a byte too far is seen.
  std::vector<unsigned char> x(bytes), y(bytes);
  if (std::fread(x.data(), 1, bytes, stdin) != bytes) return 3;
  for (int32_t kernel = 0; kernel < slipstream_dropout_kernel_count(); ++kernel) {
    if (slipstream_dropout(kernel, dtype, x.data(), y.data(), count, seed, threshold, scale,
                           std::atoi(argv[7])) != SLIPSTREAM_OK)
      return 4;
    std::fwrite(y.data(), 1, bytes, stdout);
    std::fprintf(stderr, "%s\n", slipstream_dropout_level(kernel));
  }
  return 0;
}
