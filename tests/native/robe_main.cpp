// Runs every ROBE kernel of a build on random shapes, in arrays exactly as large as they must be; for
// sanitizers. Fails where two kernels or two numbers of threads differ in a bit.

#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "slipstream/bags.h"
#include "slipstream/robe.h"

int main() {
  std::mt19937_64 draw(1);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(draw() % static_cast<uint64_t>(n)); };
  for (int round = 0; round < 1500; ++round) {
    const int64_t dims[] = {1, 3, 8, 16, 24, 32, 64, 128, 200};
    const int64_t tables = 1 + below(3), bags = below(9);
    std::vector<slipstream_robe_table> table;
    std::vector<int64_t> rows, offsets;
    int64_t width = 0;
    for (int64_t t = 0; t < tables; ++t) {
      const int64_t n = 1 + below(1000);
      table.push_back({draw(), n, dims[below(9)], below(2) ? below(n) : -1});
      rows.push_back(n);
      width += table.back().dim;
    }
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < tables; ++t)
      for (int64_t bag = 0; bag < bags; ++bag) {
        offsets.push_back(static_cast<int64_t>(ids.size()));
        for (int64_t i = below(60); i > 0; --i)
          ids.push_back(static_cast<int32_t>(below(rows[static_cast<size_t>(t)])));
      }
    const int64_t count = static_cast<int64_t>(ids.size());
    const int64_t blocks[] = {1, 7, 8, 16, 32, 48, 64, 128, 400};
    const int64_t block = blocks[below(9)];
    const int64_t size = block + below(3 * block + 50);
    const int32_t mode = static_cast<int32_t>(below(3));
    std::vector<float> array(static_cast<size_t>(size)), weights(ids.size()),
        given(static_cast<size_t>(bags * width));
    for (auto* values : {&array, &weights, &given})
      for (float& x : *values) x = static_cast<float>(below(2001) - 1000) / 1000;
    int64_t where = 0;
    if (slipstream_bags_check(ids.data(), 4, count, offsets.data(),
                              static_cast<int64_t>(offsets.size()), rows.data(), 1, tables, bags,
                              &where) != SLIPSTREAM_BAGS_FINE)
      return 2;
    std::vector<float> first[3];
    for (int32_t kernel = 0; kernel < slipstream_robe_kernel_count(); ++kernel)
      for (int32_t threads = 1; threads < 4; threads += 2) {
        const slipstream_robe_lookup lookup = {
            table.data(), tables, bags, width, ids.data(), count, offsets.data(),
            static_cast<int64_t>(offsets.size()), mode == 0 ? weights.data() : nullptr, size, block,
            4, static_cast<int32_t>(round % 2), mode, threads};
        std::vector<float> made[3] = {std::vector<float>(given.size()),
                                      std::vector<float>(array.size()),
                                      std::vector<float>(ids.size())};
        if (slipstream_robe_forward(kernel, &lookup, array.data(), made[0].data()) ||
            slipstream_robe_backward(kernel, &lookup, given.data(), 0.5f, array.data(),
                                     made[0].data(), made[1].data()) ||
            slipstream_robe_weight_gradient(kernel, &lookup, given.data(), array.data(),
                                            made[2].data()))
          return 3;
        for (int part = 0; part < 3; ++part) {
          if (kernel == 0 && threads == 1) first[part] = made[part];
          for (size_t i = 0; i < made[part].size(); ++i)
            if (made[part][i] != first[part][i]) return 4;
        }
      }
  }
  std::puts("fine");
  return 0;
}
