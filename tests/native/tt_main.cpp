// Runs every tensor-train kernel of a build on random shapes, in arrays exactly as large as they must
// be; for sanitizers. Fails where two kernels or two numbers of threads differ in a bit, and where a
// broken call is not refused.

#include <cstdio>
#include <random>
#include <vector>

#include "slipstream/tt.h"

int main() {
  std::mt19937_64 draw(1);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(draw() % static_cast<uint64_t>(n)); };
  for (int round = 0; round < 400; ++round) {
    slipstream_tt_lookup lookup = {};
    const int64_t ranks[] = {1, 2, 5, 8, 16, 17, 32}, columns[] = {1, 2, 3, 4, 5, 8};
    for (int t = 0; t < 3; ++t) {
      lookup.rows[t] = 1 + below(12);
      lookup.columns[t] = columns[below(6)];
    }
    for (int64_t& rank : lookup.ranks) rank = ranks[below(7)];
    const int64_t all = lookup.rows[0] * lookup.rows[1] * lookup.rows[2];
    const int64_t dim = lookup.columns[0] * lookup.columns[1] * lookup.columns[2];
    lookup.num_embeddings = 1 + below(all);
    lookup.padding = below(2) ? below(lookup.num_embeddings) : -1;
    std::vector<float> cores[3];
    for (int t = 0; t < 3; ++t) {
      const int64_t left = t == 0 ? 1 : lookup.ranks[t - 1], right = t == 2 ? 1 : lookup.ranks[t];
      cores[t].resize(static_cast<size_t>(lookup.rows[t] * left * lookup.columns[t] * right));
      for (float& x : cores[t]) x = static_cast<float>(below(2001) - 1000) / 1000;
      lookup.cores[t] = cores[t].data();
    }
    std::vector<int32_t> ids;
    std::vector<int64_t> offsets;
    lookup.bags = below(9);
    for (int64_t bag = 0; bag < lookup.bags; ++bag) {
      offsets.push_back(static_cast<int64_t>(ids.size()));
      for (int64_t i = below(round % 50 == 0 ? 4000 : 60); i > 0; --i)
        ids.push_back(static_cast<int32_t>(below(lookup.num_embeddings)));
    }
    std::vector<float> weights(ids.size()), given(static_cast<size_t>(lookup.bags * dim));
    for (auto* values : {&weights, &given})
      for (float& x : *values) x = static_cast<float>(below(2001) - 1000) / 1000;
    const bool cached = below(2);
    std::vector<float> cache(static_cast<size_t>(dim), 0.5f);
    std::vector<int64_t> hot = {-1, -1, -1, -1};
    const int64_t id = below(lookup.num_embeddings);
    const int64_t place = static_cast<int64_t>(static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15 >> 63);
    hot[static_cast<size_t>(2 * place)] = id;
    hot[static_cast<size_t>(2 * place + 1)] = 0;
    if (cached) {
      lookup.cache = cache.data();
      lookup.cache_rows = 1;
      lookup.hot = hot.data();
      lookup.hot_capacity = 2;
    }
    lookup.ids = ids.data();
    lookup.id_bytes = 4;
    lookup.count = static_cast<int64_t>(ids.size());
    lookup.offsets = offsets.data();
    lookup.offset_count = static_cast<int64_t>(offsets.size());
    lookup.mode = static_cast<int32_t>(below(2));
    lookup.weights = lookup.mode == SLIPSTREAM_TT_SUM ? weights.data() : nullptr;
    std::vector<float> first[6];
    for (int32_t kernel = 0; kernel < slipstream_tt_kernel_count(); ++kernel)
      for (int32_t threads = 1; threads < 4; threads += 2) {
        lookup.threads = threads;
        std::vector<float> made[6] = {
            std::vector<float>(given.size()),    std::vector<float>(ids.size()),
            std::vector<float>(cores[0].size()), std::vector<float>(cores[1].size()),
            std::vector<float>(cores[2].size()), std::vector<float>(cache.size())};
        if (slipstream_tt_forward(kernel, &lookup, made[0].data()) ||
            slipstream_tt_weight_gradient(kernel, &lookup, given.data(), made[1].data()) ||
            slipstream_tt_backward(kernel, &lookup, given.data(), made[2].data(), made[3].data(),
                                   made[4].data(), cached ? made[5].data() : nullptr))
          return 3;
        for (int part = 0; part < 6; ++part) {
          if (kernel == 0 && threads == 1) first[part] = made[part];
          if (made[part] != first[part]) return 4;
        }
      }
    std::vector<float> result(given.size());
    const auto refused = [&] {
      return slipstream_tt_forward(0, &lookup, result.data()) == SLIPSTREAM_INVALID;
    };
    const std::vector<int64_t> wide(ids.begin(), ids.end());
    std::vector<int64_t> hits(1), missed(wide.size());
    const auto count = [&] {
      return slipstream_tt_count(hot.data(), 2, 1, wide.data(), static_cast<int64_t>(wide.size()),
                                 hits.data(), missed.data());
    };
    int64_t own = 0;
    for (int64_t one : wide) own += one == id;
    if (count() != static_cast<int64_t>(wide.size()) - own || hits[0] != own) return 8;
    if (cached && !ids.empty()) {
      for (size_t at : {size_t{1}, size_t{3}}) hot[at] = 1;
      bool found = false;
      for (int32_t one : ids) found |= one == id && one != lookup.padding;
      if (found && (!refused() || count() != -1)) return 5;
    }
    lookup.rows[0] = int64_t{1} << 40;
    lookup.rows[1] = int64_t{1} << 40;
    if (!refused()) return 6;
    lookup.rows[1] = 0;
    if (!refused()) return 7;
  }
  std::puts("fine");
  return 0;
}
