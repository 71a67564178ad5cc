#include "tt/micro_batch.h"

namespace slipstream {
namespace tt {

namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr int64_t kAhead = 16;
constexpr uint64_t kHash = 0x9E3779B97F4A7C15;
constexpr int kDigitBits = 11;
constexpr uint64_t kDigits = uint64_t{1} << kDigitBits;

// Division by the same number many times: a multiplication, and at most one correction.
class Divisor {
 public:
  explicit Divisor(int64_t by)
      : by_(static_cast<uint64_t>(by)), inverse_(by_ == 1 ? 0 : ~uint64_t{0} / by_) {}

  uint64_t divide(uint64_t number, uint64_t* rest) const {
    if (by_ == 1) {
      *rest = 0;
      return number;
    }
    uint64_t times = static_cast<uint64_t>(static_cast<Wide>(number) * inverse_ >> 64);
    *rest = number - times * by_;
    while (*rest >= by_) {
      *rest -= by_;
      ++times;
    }
    return times;
  }

 private:
  uint64_t by_, inverse_;
};

// Of a power of two.
int bits_of(int64_t capacity) {
  int bits = 0;
  while (int64_t{1} << bits < capacity) ++bits;
  return bits;
}

// Where the search for an id in the table of hot rows begins.
int64_t start_of(int64_t id, int bits) {
  return bits == 0 ? 0 : static_cast<int64_t>(static_cast<uint64_t>(id) * kHash >> (64 - bits));
}

// The row of the cache that holds an id; -1 if none does.
int64_t cached(const Lookup& lookup, int64_t id, int64_t place) {
  for (int64_t tries = 0; tries < lookup.hot_capacity; ++tries) {
    if (lookup.hot[2 * place] == id) return lookup.hot[2 * place + 1];
    if (lookup.hot[2 * place] < 0) return -1;
    place = (place + 1) & (lookup.hot_capacity - 1);
  }
  return -1;
}

int64_t id_at(const Lookup& lookup, int64_t place) {
  return lookup.id_bytes == 4 ? static_cast<const int32_t*>(lookup.ids)[place]
                              : static_cast<const int64_t*>(lookup.ids)[place];
}

}  // namespace

bool MicroBatch::fill(const Lookup& lookup, int64_t from, int64_t to) {
  begin = from;
  end = to;
  const uint64_t firsts = static_cast<uint64_t>(lookup.rows[0]);
  const uint64_t lasts = static_cast<uint64_t>(lookup.rows[2]);
  const Divisor by_last(lookup.rows[2]), by_middle(lookup.rows[1]), by_first(lookup.rows[0]);
  const int bits = bits_of(lookup.hot_capacity);
  where.resize(static_cast<size_t>(to - from));
  entries_.resize(where.size());
  size_t present = 0;
  for (int64_t place = from; place < to; ++place) {
    const int64_t id = id_at(lookup, place);
    int64_t& own = where[static_cast<size_t>(place - from)];
    own = kAbsent;
    if (id == lookup.padding) continue;
    if (lookup.hot != nullptr) {
      if (place + kAhead < to)
        __builtin_prefetch(lookup.hot + 2 * start_of(id_at(lookup, place + kAhead), bits));
      const int64_t row = cached(lookup, id, start_of(id, bits));
      if (row >= lookup.cache_rows || row < -1) return false;
      own = kFirstCached - row;
      if (row >= 0) continue;
    }
    uint64_t last, middle;
    const uint64_t first =
        by_middle.divide(by_last.divide(static_cast<uint64_t>(id), &last), &middle);
    entries_[present++] = {(middle * firsts + first) * lasts + last,
                           static_cast<int32_t>(place - from)};
  }
  entries_.resize(present);
  sort(static_cast<uint64_t>(lookup.rows[1]) * firsts * lasts);
  digits.resize(present);
  uses.resize(present + 1);
  places.resize(present);
  distinct = 0;
  for (size_t i = 0; i < present; ++i) {
    if (i == 0 || entries_[i].key != entries_[i - 1].key) {
      uint64_t last, first;
      const uint64_t middle =
          by_first.divide(by_last.divide(entries_[i].key, &last), &first);
      const size_t own = static_cast<size_t>(distinct++);
      digits[own] = {static_cast<int64_t>(first), static_cast<int64_t>(middle),
                     static_cast<int64_t>(last)};
      uses[own] = static_cast<int64_t>(i);
    }
    places[i] = entries_[i].place;
    where[static_cast<size_t>(entries_[i].place)] = distinct - 1;
  }
  uses[static_cast<size_t>(distinct)] = static_cast<int64_t>(present);
  return true;
}

int64_t count_hits(const Lookup& lookup, const int64_t* ids, int64_t count, int64_t* hits,
                   int64_t* missed) {
  const int bits = bits_of(lookup.hot_capacity);
  int64_t found = 0;
  for (int64_t place = 0; place < count; ++place) {
    const int64_t id = ids[place];
    if (place + kAhead < count)
      __builtin_prefetch(lookup.hot + 2 * start_of(ids[place + kAhead], bits));
    const int64_t row = cached(lookup, id, start_of(id, bits));
    if (row >= lookup.cache_rows || row < -1) return -1;
    if (row >= 0)
      ++hits[row];
    else
      missed[found++] = id;
  }
  return found;
}

// By digits of the keys, the least significant first; equal keys stay in order.
void MicroBatch::sort(uint64_t keys) {
  for (int shift = 0; shift < 64 && (keys - 1) >> shift != 0; shift += kDigitBits) {
    uint32_t counts[kDigits] = {};
    for (const Entry& entry : entries_) ++counts[entry.key >> shift & (kDigits - 1)];
    uint32_t before = 0;
    for (uint32_t& count : counts) {
      const uint32_t own = count;
      count = before;
      before += own;
    }
    sorted_.resize(entries_.size());
    for (const Entry& entry : entries_)
      sorted_[counts[entry.key >> shift & (kDigits - 1)]++] = entry;
    entries_.swap(sorted_);
  }
}

}  // namespace tt
}  // namespace slipstream
