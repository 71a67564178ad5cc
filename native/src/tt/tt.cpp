// Which kernels this build has, and how their work is divided among micro-batches and threads.
//
// Rows are made for each distinct id of a micro-batch, sorted so that ids with the same slices stand
// together, and then added to bags in the order of the ids. Backwards, gradients of equal ids are
// added in that order first. What is added to the first and the last core goes to a few sums whose
// number depends on the ids' number and the shape alone: no result depends on the threads.

#include "slipstream/tt.h"

#include <new>

#include "aligned.h"
#include "slipstream/bags.h"
#include "threads.h"
#include "tt/kernel.h"
#include "tt/micro_batch.h"

namespace slipstream {
namespace tt {

#define KERNELS "tt_kernels.inc"
#include "registry.inc"

namespace {

using Floats = AlignedVector<float>;

constexpr int64_t kMostIds = 16384;        // of a micro-batch
constexpr int64_t kRowFloats = 1 << 21;    // of its rows: 8 MiB
constexpr int64_t kSumFloats = 1 << 22;    // of the sums of a backward pass: 16 MiB
constexpr int64_t kMostPieces = 8;
constexpr int64_t kPiece = 1024;           // ids worth a piece of their own
constexpr int64_t kGathered = 512;         // ids whose gradients a piece gathers at a time
constexpr int64_t kAhead = 8;              // rows that are fetched before they are added
constexpr int64_t kLine = 16;
constexpr int64_t kLimit = int64_t{1} << 62;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
size_t size_of(int64_t count) { return static_cast<size_t>(count); }

// Whether a product stays below kLimit.
bool fits(const int64_t* factors, int count) {
  int64_t product = 1;
  for (int i = 0; i < count; ++i) {
    if (factors[i] < 1 || factors[i] > kLimit / product) return false;
    product *= factors[i];
  }
  return true;
}

// Whether no kernel can leave its arrays.
bool consistent(const Lookup& lookup) {
  const int64_t* const q = lookup.columns;
  const int64_t together[] = {q[0], q[1], q[2], lookup.ranks[0], lookup.ranks[1]};
  if (!fits(lookup.rows, 3) || !fits(together, 5)) return false;
  if (lookup.num_embeddings < 1 ||
      lookup.num_embeddings > lookup.rows[0] * lookup.rows[1] * lookup.rows[2])
    return false;
  if (lookup.id_bytes != 4 && lookup.id_bytes != 8) return false;
  if ((lookup.cache == nullptr) != (lookup.hot == nullptr)) return false;
  if (lookup.hot != nullptr &&
      (lookup.hot_capacity < 1 || (lookup.hot_capacity & (lookup.hot_capacity - 1)) != 0))
    return false;
  if (lookup.bags == 0) return true;
  int64_t where = 0;
  return slipstream_bags_check(lookup.ids, lookup.id_bytes, lookup.count, lookup.offsets,
                               lookup.offset_count, &lookup.num_embeddings, 1, 1, lookup.bags,
                               &where) == SLIPSTREAM_BAGS_FINE;
}

int64_t bag_begin(const Lookup& lookup, int64_t bag) {
  if (lookup.offsets == nullptr) return lookup.count / lookup.bags * bag;
  return bag < lookup.offset_count ? lookup.offsets[bag] : lookup.count;
}

// The last bag that begins at or before a place; empty ones before it do not matter.
int64_t bag_of(const Lookup& lookup, int64_t place) {
  int64_t low = 0, high = lookup.bags - 1;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (bag_begin(lookup, middle) <= place)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

template <typename Body>
void call(void* context, int64_t index) {
  (*static_cast<Body*>(context))(index);
}

template <typename Body>
void parallel(int64_t count, int threads, Body body) {
  parallel_for(count, threads, call<Body>, &body);
}

// One call: what stays the same over its micro-batches.
class Call {
 public:
  Call(const Kernel& kernel, const Lookup& lookup)
      : kernel_(kernel), lookup_(lookup), sizes_(lookup),
        threads_(larger(1, lookup.threads)),
        ids_(larger(1, smaller(kMostIds, kRowFloats / sizes_.dim))),
        end_(lookup.bags == 0 ? 0 : bag_begin(lookup, lookup.bags)) {}

  bool forward(float* result);
  bool backward(const float* given, float* first, float* middle, float* last, float* cache);
  bool weight_gradient(const float* given, float* made);

 private:
  // Calls body() once for each micro-batch, in turn.
  template <typename Body>
  bool each_micro_batch(Body body) {
    for (int64_t begin = 0; begin < end_; begin += ids_) {
      if (!batch_.fill(lookup_, begin, smaller(begin + ids_, end_))) return false;
      body();
    }
    return true;
  }

  // Minimum number of places or ids for which a thread is worth it.
  int64_t shares(int64_t count) const {
    return threads_ == 1 ? 1 : larger(1, smaller(count / kPiece * 2, 4 * threads_));
  }

  void make_rows();
  void add_to_bags(int64_t first, int64_t last, float* result);
  void divide(float* result);
  void find_factors();
  void gather_gradients(const float* given, int64_t first, int64_t last, float* rows) const;
  void gather_cached(const float* given, int64_t share, int64_t shares, float* cache);
  void sum_up(int64_t pieces, Floats& sums, float* first, float* last);

  int64_t present(int64_t bag) const;
  const float* row_at(int64_t place) const {
    const int64_t own = batch_.where[size_of(place - batch_.begin)];
    if (own == kAbsent) return nullptr;
    return own >= 0 ? rows_.data() + own * sizes_.dim
                    : lookup_.cache + (kFirstCached - own) * sizes_.dim;
  }
  float factor_at(int64_t place) const {
    return lookup_.weights == nullptr ? factors_[size_of(bags_[size_of(place - batch_.begin)])]
                                      : lookup_.weights[place];
  }

  const Kernel& kernel_;
  const Lookup& lookup_;
  const Sizes sizes_;
  const int threads_;
  const int64_t ids_, end_;
  MicroBatch batch_;
  Floats rows_;                   // of the micro-batch's distinct ids, or gradients that pieces gather
  Floats scratch_;
  Floats factors_;                // by bag: 1, or 1 over its ids
  AlignedVector<int64_t> bags_;   // by place of the micro-batch
};

void Call::make_rows() {
  const int64_t pieces = shares(batch_.distinct), each = scratch_floats(sizes_);
  rows_.resize(size_of(batch_.distinct * sizes_.dim));
  scratch_.resize(size_of(pieces * each));
  parallel(pieces, threads_, [&](int64_t piece) {
    kernel_.forward(lookup_, sizes_, batch_.digits.data(), batch_.distinct * piece / pieces,
                    batch_.distinct * (piece + 1) / pieces, rows_.data(),
                    scratch_.data() + piece * each);
  });
}

// The part of bags [first, last) that lies in the micro-batch.
void Call::add_to_bags(int64_t first, int64_t last, float* result) {
  for (int64_t bag = first; bag < last; ++bag) {
    const int64_t end = smaller(bag_begin(lookup_, bag + 1), batch_.end);
    for (int64_t place = larger(bag_begin(lookup_, bag), batch_.begin); place < end; ++place) {
      const float* const row = row_at(place);
      const float* const soon = place + kAhead < batch_.end ? row_at(place + kAhead) : nullptr;
      for (int64_t i = 0; soon != nullptr && i < sizes_.dim; i += kLine)
        __builtin_prefetch(soon + i);
      const float weight = lookup_.weights == nullptr ? 1.0f : lookup_.weights[place];
      if (row != nullptr) kernel_.add(sizes_.dim, weight, row, result + bag * sizes_.dim);
    }
  }
}

bool Call::forward(float* result) {
  for (int64_t i = 0; i < lookup_.bags * sizes_.dim; ++i) result[i] = 0;
  const bool fine = each_micro_batch([&] {
    make_rows();
    const int64_t first = bag_of(lookup_, batch_.begin);
    const int64_t count = bag_of(lookup_, batch_.end - 1) + 1 - first;
    const int64_t pieces = smaller(shares(batch_.end - batch_.begin), count);
    parallel(pieces, threads_, [&](int64_t piece) {
      add_to_bags(first + count * piece / pieces, first + count * (piece + 1) / pieces, result);
    });
  });
  if (fine && lookup_.mode == SLIPSTREAM_TT_MEAN) divide(result);
  return fine;
}

// Ids of a bag that are not padding.
int64_t Call::present(int64_t bag) const {
  const int64_t begin = bag_begin(lookup_, bag), end = bag_begin(lookup_, bag + 1);
  if (lookup_.padding < 0) return end - begin;
  int64_t count = 0;
  for (int64_t place = begin; place < end; ++place)
    count += (lookup_.id_bytes == 4 ? static_cast<const int32_t*>(lookup_.ids)[place]
                                    : static_cast<const int64_t*>(lookup_.ids)[place]) !=
             lookup_.padding;
  return count;
}

void Call::divide(float* result) {
  for (int64_t bag = 0; bag < lookup_.bags; ++bag) {
    const int64_t count = present(bag);
    for (int64_t i = bag * sizes_.dim; count > 1 && i < (bag + 1) * sizes_.dim; ++i)
      result[i] /= static_cast<float>(count);
  }
}

void Call::find_factors() {
  factors_.resize(size_of(lookup_.bags));
  for (int64_t bag = 0; bag < lookup_.bags; ++bag) {
    const int64_t count = lookup_.mode == SLIPSTREAM_TT_MEAN ? present(bag) : 1;
    factors_[size_of(bag)] = count > 1 ? 1.0f / static_cast<float>(count) : 1.0f;
  }
}

// rows[u - first] = the sum of what the bags give id u, in the order of its places.
void Call::gather_gradients(const float* given, int64_t first, int64_t last, float* rows) const {
  for (int64_t u = first; u < last; ++u) {
    float* const sum = rows + (u - first) * sizes_.dim;
    for (int64_t i = 0; i < sizes_.dim; ++i) sum[i] = 0;
    for (int64_t use = batch_.uses[size_of(u)]; use < batch_.uses[size_of(u + 1)]; ++use) {
      const int64_t place = batch_.begin + batch_.places[size_of(use)];
      const float* const own = given + bags_[size_of(place - batch_.begin)] * sizes_.dim;
      kernel_.add(sizes_.dim, factor_at(place), own, sum);
    }
  }
}

// To the cached rows that are this share's: each in the order of its places.
void Call::gather_cached(const float* given, int64_t share, int64_t shares, float* cache) {
  const int64_t begin = lookup_.cache_rows * share / shares;
  const int64_t end = lookup_.cache_rows * (share + 1) / shares;
  for (int64_t place = batch_.begin; place < batch_.end; ++place) {
    const int64_t row = kFirstCached - batch_.where[size_of(place - batch_.begin)];
    if (row < begin || row >= end) continue;
    const float* const own = given + bags_[size_of(place - batch_.begin)] * sizes_.dim;
    kernel_.add(sizes_.dim, factor_at(place), own, cache + row * sizes_.dim);
  }
}

bool Call::backward(const float* given, float* first, float* middle, float* last, float* cache) {
  const int64_t own = lookup_.rows[0] * sizes_.first + lookup_.rows[2] * sizes_.last;
  int64_t most = smaller(smaller(end_, ids_) / kPiece, kMostPieces);
  most = larger(1, smaller(most, kSumFloats / own));
  const int64_t each = scratch_floats(sizes_);
  Floats sums(size_of(most * own), 0.0f), last_turned(size_of(lookup_.rows[2] * sizes_.last));
  for (int64_t slice = 0; slice < lookup_.rows[2] * sizes_.last; slice += sizes_.last)
    kernel_.transpose(sizes_.r2, sizes_.q3, lookup_.cores[2] + slice, sizes_.q3,
                      last_turned.data() + slice, sizes_.r2);
  scratch_.resize(size_of(most * each));
  rows_.resize(size_of(most * kGathered * sizes_.dim));
  find_factors();
  const bool fine = each_micro_batch([&] {
    const int64_t count = batch_.end - batch_.begin;
    bags_.resize(size_of(count));
    int64_t bag = bag_of(lookup_, batch_.begin);
    for (int64_t place = batch_.begin; place < batch_.end; ++place) {
      while (bag_begin(lookup_, bag + 1) <= place) ++bag;
      bags_[size_of(place - batch_.begin)] = bag;
    }
    if (cache != nullptr)
      parallel(threads_, threads_,
               [&](int64_t share) { gather_cached(given, share, threads_, cache); });
    // Pieces end where the middle slice changes: its gradient is one piece's alone.
    const auto boundary = [&](int64_t piece) {
      int64_t u = batch_.distinct * piece / most;
      while (u > 0 && u < batch_.distinct &&
             batch_.digits[size_of(u)].middle == batch_.digits[size_of(u - 1)].middle)
        ++u;
      return u;
    };
    parallel(most, threads_, [&](int64_t piece) {
      float* const sum = sums.data() + piece * own;
      float* const rows = rows_.data() + piece * kGathered * sizes_.dim;
      const int64_t end = boundary(piece + 1);
      for (int64_t u = boundary(piece); u < end; u += kGathered) {
        const int64_t gathered = smaller(kGathered, end - u);
        gather_gradients(given, u, u + gathered, rows);
        kernel_.backward(lookup_, sizes_, batch_.digits.data() + u, 0, gathered, last_turned.data(),
                         rows, sum, middle, sum + lookup_.rows[0] * sizes_.first,
                         scratch_.data() + piece * each);
      }
    });
  });
  if (fine) sum_up(most, sums, first, last);
  return fine;
}

// Leaves all pieces' sums in the first one's place.
void Call::sum_up(int64_t pieces, Floats& sums, float* first, float* last) {
  const int64_t firsts = lookup_.rows[0] * sizes_.first, lasts = lookup_.rows[2] * sizes_.last;
  float* const sum = sums.data();
  for (int64_t piece = 1; piece < pieces; ++piece)
    kernel_.add(firsts + lasts, 1.0f, sum + piece * (firsts + lasts), sum);
  kernel_.add(firsts, 1.0f, sum, first);
  scratch_.resize(size_of(larger(sizes_.last, static_cast<int64_t>(scratch_.size()))));
  for (int64_t slice = 0; slice < lasts; slice += sizes_.last) {
    kernel_.transpose(sizes_.q3, sizes_.r2, sum + firsts + slice, sizes_.r2, scratch_.data(),
                      sizes_.q3);
    kernel_.add(sizes_.last, 1.0f, scratch_.data(), last + slice);
  }
}

bool Call::weight_gradient(const float* given, float* made) {
  for (int64_t place = 0; place < lookup_.count; ++place) made[place] = 0;
  return each_micro_batch([&] {
    make_rows();
    int64_t bag = bag_of(lookup_, batch_.begin);
    for (int64_t place = batch_.begin; place < batch_.end; ++place) {
      while (bag_begin(lookup_, bag + 1) <= place) ++bag;
      const float* const row = row_at(place);
      double total = 0;
      for (int64_t i = 0; row != nullptr && i < sizes_.dim; ++i)
        total += double{row[i]} * given[bag * sizes_.dim + i];
      made[place] = static_cast<float>(total);
    }
  });
}

// Runs body(Call&) where the arguments allow it.
template <typename Body>
int32_t run(int32_t kernel, const Lookup& lookup, Body body) {
  if (!known(kernel) || !consistent(lookup)) return SLIPSTREAM_INVALID;
  try {
    Call call(*kKernels[kernel], lookup);
    return body(call) ? SLIPSTREAM_OK : SLIPSTREAM_INVALID;
  } catch (const std::bad_alloc&) {
    return SLIPSTREAM_NO_MEMORY;
  }
}

}  // namespace
}  // namespace tt
}  // namespace slipstream

using namespace slipstream::tt;

extern "C" {

int32_t slipstream_tt_kernel_count(void) { return kCount; }

const char* slipstream_tt_level(int32_t kernel) {
  return known(kernel) ? kKernels[kernel]->level : "";
}

int32_t slipstream_tt_forward(int32_t kernel, const slipstream_tt_lookup* lookup, float* result) {
  return run(kernel, *lookup, [&](Call& call) { return call.forward(result); });
}

int32_t slipstream_tt_backward(int32_t kernel, const slipstream_tt_lookup* lookup,
                               const float* result_gradient, float* first, float* middle,
                               float* last, float* cache) {
  return run(kernel, *lookup, [&](Call& call) {
    return call.backward(result_gradient, first, middle, last, cache);
  });
}

int32_t slipstream_tt_weight_gradient(int32_t kernel, const slipstream_tt_lookup* lookup,
                                      const float* result_gradient, float* weight_gradient) {
  return run(kernel, *lookup, [&](Call& call) {
    return call.weight_gradient(result_gradient, weight_gradient);
  });
}

int64_t slipstream_tt_count(const int64_t* hot, int64_t hot_capacity, int64_t cache_rows,
                            const int64_t* ids, int64_t count, int64_t* hits, int64_t* missed) {
  if (hot_capacity < 1 || (hot_capacity & (hot_capacity - 1)) != 0) return -1;
  Lookup lookup = {};
  lookup.hot = hot;
  lookup.hot_capacity = hot_capacity;
  lookup.cache_rows = cache_rows;
  return count_hits(lookup, ids, count, hits, missed);
}

}  // extern "C"
