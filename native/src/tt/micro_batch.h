// The ids of a micro-batch, each once, in the order in which their slices are shared.

#pragma once

#include <cstdint>

#include "aligned.h"
#include "tt/kernel.h"

namespace slipstream {
namespace tt {

// Value of `where` for an id that is not a row of the train.
constexpr int64_t kAbsent = -1;
constexpr int64_t kFirstCached = -2;  // and, downwards, the rows of the cache

class MicroBatch {
 public:
  // Places [begin, end) of the ids. False: the table of hot rows names a row the cache lacks.
  bool fill(const Lookup& lookup, int64_t begin, int64_t end);

  int64_t begin, end;
  int64_t distinct;                    // ids that are rows of the train, each once
  AlignedVector<Digits> digits;        // [>= distinct], by middle, first and last digit
  AlignedVector<int64_t> uses;         // [>= distinct + 1]: where in `places` an id's begin
  AlignedVector<int32_t> places;       // less `begin`; of each id rising
  AlignedVector<int64_t> where;        // by place: which of the distinct ids, or see above

 private:
  struct Entry {
    uint64_t key;
    int32_t place;
  };
  void sort(uint64_t keys);

  AlignedVector<Entry> entries_, sorted_;
};

// See slipstream_tt_count.
int64_t count_hits(const Lookup& lookup, const int64_t* ids, int64_t count, int64_t* hits,
                   int64_t* missed);

}  // namespace tt
}  // namespace slipstream
