// Multiplies with every low-bit kernel of this build and compares with plain 64-bit sums.
//
// It stands alone, so that it runs where Python does not: under an emulator of another processor,
// with emulated instructions, and with a sanitizer in every part of the program.
//
//     lowbit_driver [--seed N] [--rounds N] [--most MACS] [--kernel SCHEME_LEVEL]... [W,A,M,N,K]...
//
// Without problems it makes them: for every pair of bit widths and every K of a list, all-max
// operands and others. Prints a line for each kernel; exits with 1 if one was wrong or none ran.

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "aligned.h"
#include "lowbit/registry.h"
#include "slipstream/lowbit.h"

namespace {

using slipstream::AlignedVector;
using slipstream::lowbit::Kernel;
using slipstream::lowbit::kRowBlock;
using slipstream::lowbit::Problem;

using Random = std::mt19937_64;

// 1336 and 1338 are the last K before and the first after W3A3 fills a 16-bit sum of pairs.
constexpr int64_t kDepths[] = {1, 3, 17, 64, 127, 512, 1336, 1338, 4608};
constexpr int64_t kRows[] = {1, 2, 3, 5, 8, 9, 13, 17, 64, kRowBlock, 200};
constexpr int64_t kColumns[] = {1, 3, 8, 17, 33, 64, 127, 512};
constexpr uint8_t kGarbage = 0xa5;  // in uninitialised memory
constexpr int32_t kUntouched = -0x5a5a5a5b;
constexpr int64_t kReadBeyond = 64;  // what kernel.h allows

enum class Fill { kRandom, kMost, kLeast };
constexpr Fill kFills[] = {Fill::kRandom, Fill::kMost, Fill::kLeast};

template <typename T, std::size_t N>
T one_of(const T (&values)[N], Random& random) {
  return values[random() % N];
}

std::vector<uint8_t> matrix(int64_t rows, int64_t columns, int64_t stride, int bits, Fill fill,
                            Random& random) {
  std::vector<uint8_t> values(static_cast<std::size_t>((rows - 1) * stride + columns), kGarbage);
  const unsigned most = (1u << bits) - 1;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < columns; ++k)
      values[static_cast<std::size_t>(i * stride + k)] = static_cast<uint8_t>(
          fill == Fill::kRandom ? random() & most : fill == Fill::kMost ? most : 0);
  return values;
}

AlignedVector<uint8_t> buffer(int64_t bytes) {
  return AlignedVector<uint8_t>(static_cast<std::size_t>(bytes), kGarbage);
}

// What multiplies and what has to come out, in words where they differ.
struct Trial {
  Problem p;
  Fill a_fill, w_fill;
  int64_t lda, ldw;
  std::vector<uint8_t> a, w;

  Trial(const Problem& problem, Fill fill_a, Fill fill_w, Random& random)
      : p(problem),
        a_fill(fill_a),
        w_fill(fill_w),
        lda(p.k + static_cast<int64_t>(random() % 3)),
        ldw(p.k + static_cast<int64_t>(random() % 3)),
        a(matrix(p.m, p.k, lda, p.abits, a_fill, random)),
        w(matrix(p.n, p.k, ldw, p.wbits, w_fill, random)) {}

  int64_t sum(int64_t i, int64_t j, int64_t a_zero, int64_t w_zero) const {
    const uint8_t *x = &a[static_cast<std::size_t>(i * lda)],
                  *y = &w[static_cast<std::size_t>(j * ldw)];
    int64_t total = 0;
    for (int64_t k = 0; k < p.k; ++k) total += (x[k] - a_zero) * (y[k] - w_zero);
    return total;
  }

  std::string wrong(const char* what, int64_t i, int64_t j, int64_t is, int64_t should) const {
    char text[200];
    std::snprintf(text, sizeof text,
                  "%s W%dA%d m=%" PRId64 " n=%" PRId64 " k=%" PRId64 " fills %d %d: out[%" PRId64
                  "][%" PRId64 "] is %" PRId64 ", should be %" PRId64,
                  what, p.wbits, p.abits, p.m, p.n, p.k, static_cast<int>(a_fill),
                  static_cast<int>(w_fill), i, j, is, should);
    return text;
  }
};

// Output with strides, and the bytes between its rows.
struct Output {
  int64_t rows, columns, stride;
  std::vector<int32_t> values;

  Output(int64_t m, int64_t n, Random& random)
      : rows(m),
        columns(n),
        stride(n + static_cast<int64_t>(random() % 3)),
        values(static_cast<std::size_t>((m - 1) * stride + n), kUntouched) {}

  template <typename Expected>
  std::string compare(const Trial& trial, const char* what, const Expected& expected) const {
    for (int64_t at = 0; at < static_cast<int64_t>(values.size()); ++at) {
      const int64_t i = at / stride, j = at % stride;
      const int64_t should = j < columns ? expected(i, j) : kUntouched;
      const int32_t is = values[static_cast<std::size_t>(at)];
      if (static_cast<uint32_t>(is) != static_cast<uint32_t>(should))
        return trial.wrong(what, i, j, is, should);
    }
    return "";
  }
};

// The kernel in isolation, in buffers of exactly the requested size.
std::string bare(const Kernel& kernel, const Trial& trial, Random& random) {
  const Problem& p = trial.p;
  Problem offline = p;
  offline.m = 0;
  auto weights = buffer(kernel.weight_bytes(offline) + kReadBeyond);
  kernel.pack_weights(offline, trial.w.data(), trial.ldw, weights.data());
  auto activations = buffer(kernel.activation_bytes(p) + kReadBeyond);
  kernel.pack_activations(p, trial.a.data(), trial.lda, activations.data());

  // In two parts where there is more than one panel, as threads do.
  const int64_t panels = (p.n + kernel.panel - 1) / kernel.panel;
  const int64_t cut = static_cast<int64_t>(random() % static_cast<uint64_t>(panels)) * kernel.panel;
  for (const auto& [first, last] : {std::pair{int64_t{0}, cut}, std::pair{cut, p.n}}) {
    if (first == last) continue;
    Output out(p.m, last - first, random);
    auto scratch = buffer(kernel.scratch_bytes(p));
    kernel.multiply(p, activations.data(), weights.data(), first, last, scratch.data(),
                    out.values.data(), out.stride);
    const int64_t from = first;
    std::string why = out.compare(trial, "kernel", [&](int64_t i, int64_t j) {
      return trial.sum(i, from + j, 0, kernel.weight_offset(p));
    });
    if (!why.empty()) return why;
  }
  return "";
}

// The same through the C interface: zero points, signed activations, threads, range checks.
std::string through_the_door(int32_t index, const Trial& trial, Random& random) {
  const Problem& p = trial.p;
  std::vector<int32_t> zeros(static_cast<std::size_t>(p.n));
  for (int32_t& zero : zeros) zero = static_cast<int32_t>(random() % (1u << p.wbits));
  slipstream_lowbit_weights* weights = nullptr;
  if (slipstream_lowbit_pack(index, p.n, p.k, p.wbits, p.abits, trial.w.data(), trial.ldw,
                             zeros.data(), &weights) != SLIPSTREAM_OK)
    return trial.wrong("packing", 0, 0, 1, 0);

  const bool is_signed = random() % 2 != 0;
  const int32_t middle = is_signed ? 1 << (p.abits - 1) : 0;
  const int32_t a_zero = static_cast<int32_t>(random() % (1u << p.abits));
  const int threads = 1 + static_cast<int>(random() % 3);
  std::vector<uint8_t> a = trial.a;
  for (uint8_t& value : a) value = static_cast<uint8_t>(value - middle);
  Output out(p.m, p.n, random);
  const int32_t status =
      slipstream_lowbit_multiply(weights, a.data(), is_signed, p.m, trial.lda, a_zero - middle,
                                 out.values.data(), out.stride, threads);
  std::string why =
      status != SLIPSTREAM_OK
          ? trial.wrong("status", 0, 0, status, SLIPSTREAM_OK)
          : out.compare(trial, "product", [&](int64_t i, int64_t j) {
              return trial.sum(i, j, a_zero, zeros[static_cast<std::size_t>(j)]);
            });

  if (why.empty() && p.abits < 8) {
    const auto row = random() % static_cast<uint64_t>(p.m);
    a[row * static_cast<uint64_t>(trial.lda)] = static_cast<uint8_t>((1 << p.abits) - middle);
    const int32_t refused =
        slipstream_lowbit_multiply(weights, a.data(), is_signed, p.m, trial.lda, a_zero - middle,
                                   out.values.data(), out.stride, threads);
    if (refused != SLIPSTREAM_INVALID)
      why = trial.wrong("range", static_cast<int64_t>(row), 0, refused, SLIPSTREAM_INVALID);
  }
  slipstream_lowbit_free(weights);
  return why;
}

std::string right(int32_t index, const Problem& p, Fill a_fill, Fill w_fill, Random& random) {
  const Kernel& kernel = *slipstream::lowbit::find(index);
  if (p.m <= kRowBlock) {
    std::string why = bare(kernel, Trial(p, a_fill, w_fill, random), random);
    if (!why.empty()) return why;
  }
  return through_the_door(index, Trial(p, a_fill, w_fill, random), random);
}

struct Case {
  Problem problem;
  Fill a, w;
};

std::vector<Case> cases(const Kernel& kernel, int rounds, int64_t most, Random& random) {
  std::vector<Case> made;
  for (int wbits = 1; wbits <= 8; ++wbits) {
    for (int abits = 1; abits <= 8; ++abits) {
      if (!kernel.supports(wbits, abits)) continue;
      for (const int64_t k : kDepths) {
        for (int round = 0; round < 2 * rounds; ++round) {
          Problem p{};
          do {
            p = Problem{one_of(kRows, random), one_of(kColumns, random), k, wbits, abits};
          } while (p.m * p.n * p.k > std::max(most, k));
          const bool full = round % 2 == 0;
          made.push_back({p, full ? Fill::kMost : one_of(kFills, random),
                          full ? Fill::kMost : one_of(kFills, random)});
        }
      }
    }
  }
  return made;
}

bool runs_here(const Kernel& kernel) {
  uint32_t features = slipstream_cpu_features();
#ifdef SLIPSTREAM_EMULATED
  if (std::strcmp(kernel.level, "avx512") == 0) return true;
  features |= SLIPSTREAM_CPU_AVX_VNNI | SLIPSTREAM_CPU_AMX_INT8;  // of AVX2's instructions
#endif
  return (kernel.features & ~features) == 0;
}

}  // namespace

int main(int count, char** words) {
  uint64_t seed = 1;
  int rounds = 1;
  int64_t most = 1 << 17;
  std::vector<std::string> chosen;
  std::vector<Problem> given;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    Problem p{};
    if (word == "--seed" && i + 1 < count)
      seed = std::strtoull(words[++i], nullptr, 10);
    else if (word == "--rounds" && i + 1 < count)
      rounds = std::atoi(words[++i]);
    else if (word == "--most" && i + 1 < count)
      most = std::atoll(words[++i]);
    else if (word == "--kernel" && i + 1 < count)
      chosen.push_back(words[++i]);
    else if (std::sscanf(words[i], "%d,%d,%" SCNd64 ",%" SCNd64 ",%" SCNd64, &p.wbits, &p.abits,
                         &p.m, &p.n, &p.k) == 5)
      given.push_back(p);
    else
      return std::fprintf(stderr, "lowbit_driver: what is '%s'?\n", words[i]), 2;
  }

  int ran = 0, wrong = 0;
  for (int32_t index = 0; const Kernel* kernel = slipstream::lowbit::find(index); ++index) {
    const std::string name = std::string(kernel->scheme) + "_" + kernel->level;
    if (!chosen.empty() && std::find(chosen.begin(), chosen.end(), name) == chosen.end()) continue;
    if (!runs_here(*kernel)) {
      std::printf("%s skipped\n", name.c_str());
      continue;
    }
    Random random(seed);
    std::vector<Case> all;
    for (const Problem& p : given)
      if (kernel->supports(p.wbits, p.abits)) all.push_back({p, Fill::kRandom, Fill::kRandom});
    if (given.empty()) all = cases(*kernel, rounds, most, random);
    int failures = 0;
    for (const Case& c : all) {
      const std::string why = right(index, c.problem, c.a, c.w, random);
      if (!why.empty() && ++failures <= 5) std::printf("%s %s\n", name.c_str(), why.c_str());
    }
    std::printf("%s %zu problems %d failures\n", name.c_str(), all.size(), failures);
    ran += !all.empty();
    wrong += failures;
  }
  return ran == 0 || wrong > 0;
}
