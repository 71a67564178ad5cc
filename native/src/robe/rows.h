// The kernels, for any vector: the including file defines `Floats`, kWidth numbers of them.
//
// Rows that consist of whole vectors in blocks of whole vectors, at most 16 of them, take the way of
// `Ahead`: addresses are hashed and fetched a few ids before they are used, and a bag's sum stays
// in registers. Everything else, and a block that goes round the end of the array, goes piece by
// piece through `each_piece`. Both add in the same order: no result depends on the way it took.

#pragma once

#include <cstdint>
#include <cstring>

#include "robe/kernel.h"

namespace slipstream {
namespace robe {
namespace {

constexpr int64_t kWidth = Floats::kWidth;
constexpr int64_t kAhead = 16;   // rows are hashed before they are used
constexpr int64_t kFetched = 8;  // and fetched: of more, lines wait for room among those under way
constexpr int64_t kRing = 32;
constexpr int64_t kWritten = 8;  // bags before a result is written it is fetched
constexpr int64_t kLineFloats = 16;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t id_at(const Lookup& lookup, int64_t place) {
  return lookup.id_bytes == 4 ? static_cast<const int32_t*>(lookup.ids)[place]
                              : static_cast<const int64_t*>(lookup.ids)[place];
}

float weight_at(const Lookup& lookup, int64_t place) {
  return lookup.weights == nullptr ? 1.0f : lookup.weights[place];
}

// Where the ids of a table's bags begin; those of the bag before end there.
class Begins {
 public:
  explicit Begins(const Part& part)
      : offsets_(part.lookup.offsets),
        // Of bags of one size, found once: a division takes long.
        each_(offsets_ == nullptr && part.lookup.bags > 0
                  ? part.lookup.count / (part.lookup.table_count * part.lookup.bags)
                  : 0),
        first_(part.number * part.lookup.bags),
        offset_count_(part.lookup.offset_count),
        count_(part.lookup.count) {}

  int64_t of(int64_t bag) const {
    const int64_t number = first_ + bag;
    if (offsets_ == nullptr) return each_ * number;
    return number < offset_count_ ? offsets_[number] : count_;
  }

 private:
  const int64_t* const offsets_;
  const int64_t each_, first_, offset_count_, count_;
};

int64_t count_in(const Part& part, int64_t begin, int64_t end) {
  if (part.table.padding < 0) return end - begin;
  int64_t count = 0;
  for (int64_t place = begin; place < end; ++place)
    count += id_at(part.lookup, place) != part.table.padding;
  return count;
}

// The signs of a row from element `i` on, one to a bit; remembers the word it used last.
class Signs {
 public:
  Signs(const Part& part, int64_t row) : table_(part.table), row_(row), on_(part.lookup.sign) {}

  // At least `count` bits, at most 64.
  uint64_t from(int64_t i, int64_t count) {
    if (!on_) return 0;
    const int64_t shift = i % 64;
    uint64_t bits = word(i / 64) >> shift;
    if (shift + count > 64) bits |= word(i / 64 + 1) << (64 - shift);
    return bits;
  }

 private:
  uint64_t word(int64_t index) {
    if (index != index_) {
      index_ = index;
      word_ = sign_word(table_, row_, index);
    }
    return word_;
  }

  const Table& table_;
  int64_t row_, index_ = -1;
  uint64_t word_ = 0;
  bool on_;
};

// Calls body(slot, element, length) for every contiguous piece of a row, in order.
template <typename Body>
void each_piece(const Part& part, int64_t row, Body body) {
  const Lookup& lookup = part.lookup;
  const int64_t dim = part.table.dim, block = lookup.block;
  const bool shared = block > dim;
  const uint64_t key = shared ? part.table.key : row_key(part.table, row);
  int64_t number = shared ? row * dim / block : 0;
  int64_t shift = shared ? row * dim % block : 0;
  for (int64_t element = 0; element < dim; ++number, shift = 0) {
    int64_t left = smaller(block - shift, dim - element);
    int64_t slot = start_of(lookup, key, static_cast<uint64_t>(number)) + shift;
    if (slot >= lookup.size) slot -= lookup.size;
    while (left > 0) {
      const int64_t length = smaller(left, lookup.size - slot);
      body(slot, element, length);
      element += length;
      left -= length;
      slot = 0;
    }
  }
}

// By its bits: a branch would be taken as often as not.
float signed_by(uint64_t bit, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits ^= static_cast<uint32_t>(bit & 1) << 31;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// into[i] = combine(into[i], signed array[slot + i] * weight), by vectors and then one by one.
template <typename Combine>
void add_piece(const float* from, Signs& signs, int64_t element, int64_t length, float weight,
               float* into, Combine combine) {
  int64_t i = 0;
  const Floats factor = Floats::all(weight);
  for (; i + kWidth <= length; i += kWidth) {
    const Floats x = Floats::load(from + i).negated(signs.from(element + i, kWidth));
    combine(into + i, x.times(factor));
  }
  for (; i < length; ++i)
    combine(into + i, signed_by(signs.from(element + i, 1), from[i]) * weight);
}

struct Sum {
  void operator()(float* y, Floats x) const { Floats::load(y).plus(x).store(y); }
  void operator()(float* y, float x) const { *y += x; }
};

struct Largest {
  void operator()(float* y, Floats x) const { Floats::load(y).larger(x).store(y); }
  void operator()(float* y, float x) const { *y = x > *y ? x : *y; }
};

struct First {
  void operator()(float* y, Floats x) const { x.store(y); }
  void operator()(float* y, float x) const { *y = x; }
};

template <typename Combine>
void add_row(const Part& part, int64_t row, float weight, const float* array, float* into,
             Combine combine) {
  Signs signs(part, row);
  each_piece(part, row, [&](int64_t slot, int64_t element, int64_t length) {
    add_piece(array + slot, signs, element, length, weight, into + element, combine);
  });
}

void divide(float* y, int64_t dim, int64_t count) {
  for (int64_t i = 0; i < dim; ++i) y[i] /= static_cast<float>(count);
}

void forward_bag(const Part& part, int64_t begin, int64_t end, const float* array, float* y) {
  for (int64_t i = 0; i < part.table.dim; ++i) y[i] = 0;
  int64_t found = 0;
  for (int64_t place = begin; place < end; ++place) {
    const int64_t row = id_at(part.lookup, place);
    if (row == part.table.padding) continue;
    const float weight = weight_at(part.lookup, place);
    if (part.lookup.mode != SLIPSTREAM_MAX)
      add_row(part, row, weight, array, y, Sum());
    else if (found == 0)
      add_row(part, row, weight, array, y, First());
    else
      add_row(part, row, weight, array, y, Largest());
    ++found;
  }
  if (part.lookup.mode == SLIPSTREAM_MEAN && found > 0) divide(y, part.table.dim, found);
}

void forward_by_pieces(const Part& part, const float* array, float* result) {
  const Begins begins(part);
  for (int64_t bag = part.first; bag < part.last; ++bag)
    forward_bag(part, begins.of(bag), begins.of(bag + 1), array,
                result + bag * part.lookup.width + part.column);
}

// Adds factor * the signed gradient of a row to those of its slots that lie in [begin, end).
void scatter_row(const Part& part, int64_t row, float factor, const float* given, float* gradient,
                 int64_t begin, int64_t end) {
  Signs signs(part, row);
  const Floats factors = Floats::all(factor);
  each_piece(part, row, [&](int64_t slot, int64_t element, int64_t length) {
    int64_t i = slot < begin ? begin - slot : 0;
    const int64_t stop = smaller(length, end - slot);
    for (; i + kWidth <= stop; i += kWidth) {
      const Floats x = Floats::load(given + element + i).times(factors);
      Sum()(gradient + slot + i, x.negated(signs.from(element + i, kWidth)));
    }
    for (; i < stop; ++i)
      gradient[slot + i] += signed_by(signs.from(element + i, 1), given[element + i] * factor);
  });
}

float factor_of(const Part& part, int64_t begin, int64_t end, float scale) {
  if (part.lookup.mode != SLIPSTREAM_MEAN) return scale;
  const int64_t count = count_in(part, begin, end);
  return count > 0 ? scale / static_cast<float>(count) : scale;
}

// The first id whose number is the largest gets the element's gradient.
void scatter_largest(const Part& part, int64_t from, int64_t to, const float* given,
                     const float* result, float scale, const float* array, float* gradient,
                     int64_t begin, int64_t end) {
  constexpr int64_t kSlice = 256;
  for (int64_t slice = 0; slice < part.table.dim; slice += kSlice) {
    bool given_away[kSlice] = {};
    for (int64_t place = from; place < to; ++place) {
      const int64_t row = id_at(part.lookup, place);
      if (row == part.table.padding) continue;
      Signs signs(part, row);
      each_piece(part, row, [&](int64_t slot, int64_t element, int64_t length) {
        for (int64_t i = 0; i < length; ++i) {
          const int64_t at = element + i;
          if (at < slice || at >= slice + kSlice || given_away[at - slice]) continue;
          const uint64_t bit = signs.from(at, 1);
          if (signed_by(bit, array[slot + i]) != result[at]) continue;
          given_away[at - slice] = true;
          if (slot + i >= begin && slot + i < end)
            gradient[slot + i] += signed_by(bit, given[at] * scale);
        }
      });
    }
  }
}

void backward_by_pieces(const Part& part, const float* given, float scale, const float* array,
                        const float* result, float* gradient, int64_t begin, int64_t end) {
  const Begins begins(part);
  for (int64_t bag = part.first; bag < part.last; ++bag) {
    const int64_t from = begins.of(bag), to = begins.of(bag + 1);
    const int64_t at = bag * part.lookup.width + part.column;
    if (part.lookup.mode == SLIPSTREAM_MAX) {
      scatter_largest(part, from, to, given + at, result + at, scale, array, gradient, begin, end);
      continue;
    }
    const float factor = factor_of(part, from, to, scale);
    for (int64_t place = from; place < to; ++place) {
      const int64_t row = id_at(part.lookup, place);
      if (row != part.table.padding)
        scatter_row(part, row, factor * weight_at(part.lookup, place), given + at, gradient, begin,
                    end);
    }
  }
}

void weight_gradient_of(const Part& part, const float* given, const float* array, float* made) {
  const Begins begins(part);
  for (int64_t bag = part.first; bag < part.last; ++bag) {
    const float* y = given + bag * part.lookup.width + part.column;
    const int64_t end = begins.of(bag + 1);
    for (int64_t place = begins.of(bag); place < end; ++place) {
      const int64_t row = id_at(part.lookup, place);
      double total = 0;
      Signs signs(part, row);
      if (row != part.table.padding)
        each_piece(part, row, [&](int64_t slot, int64_t element, int64_t length) {
          for (int64_t i = 0; i < length; ++i)
            total += double{signed_by(signs.from(element + i, 1), array[slot + i])} * y[element + i];
        });
      made[place] = static_cast<float>(total);
    }
  }
}

// Vectors of a row, vectors of a block, and whether there are signs.
//
// Rows are hashed kAhead at a time: the inputs of one hash are adjacent for all rows of such a
// group, so that the compiler hashes several in a vector. They are prefetched one by one, each as
// another is used: a CPU can wait for some tens of lines, and stalls beyond that.
template <int kRow_, int kBlock_, bool kSign>
class Ahead {
 public:
  static constexpr int kBlocks = kRow_ / kBlock_;
  static constexpr int kWords = kSign ? (kRow_ * static_cast<int>(kWidth) + 63) / 64 : 1;

  Ahead(const Part& part, const float* array, int64_t begin, int64_t end)
      : part_(part), array_(array), begin_(begin), hashed_(begin), end_(end) {
    hash();
    for (int64_t place = begin; place < smaller(begin + kFetched, end); ++place) fetch(place);
  }

  // Returns the position of the row of a place; call it once for each place, in order.
  int64_t find(int64_t place) {
    if (place + kAhead == hashed_) hash();
    if (place + kFetched < end_) fetch(place + kFetched);
    return ring(place);
  }

  int64_t slot(int64_t at, int block) const { return slots_[block][at]; }
  // Of a row's blocks the last.
  int64_t furthest(int64_t at) const {
    int64_t slot = slots_[0][at];
    for (int block = 1; block < kBlocks; ++block)
      slot = slots_[block][at] > slot ? slots_[block][at] : slot;
    return slot;
  }

  Floats signed_vector(int64_t at, int vector, Floats x) const {
    if (!kSign) return x;
    const int64_t element = vector * kWidth;
    return x.negated(signs_[element / 64][at] >> (element % 64));
  }

 private:
  int64_t ring(int64_t place) const {
    return static_cast<int64_t>(static_cast<uint64_t>(place - begin_) % kRing);
  }

  // Inlined, or the compiler finds a function without any effect and leaves it out.
  __attribute__((always_inline)) void fetch(int64_t place) const {
    const int64_t at = ring(place);
    for (int block = 0; block < kBlocks; ++block) {
      const float* const first = array_ + slots_[block][at];
      for (int64_t v = 0; v < kBlock_ * kWidth; v += kLineFloats) __builtin_prefetch(first + v);
      __builtin_prefetch(first + kBlock_ * kWidth - 1);
    }
  }

  // The next kAhead rows, while as many wait to be used.
  __attribute__((noinline)) void hash() {
    const Lookup& lookup = part_.lookup;
    const Table& table = part_.table;
    const int64_t begin = hashed_, count = smaller(kAhead, end_ - begin);
    hashed_ += kAhead;
    if (count <= 0) return;
    alignas(64) uint64_t rows[kAhead] = {}, keys[kAhead];
    if (lookup.id_bytes == 4)
      copy(static_cast<const int32_t*>(lookup.ids) + begin, count, rows);
    else
      copy(static_cast<const int64_t*>(lookup.ids) + begin, count, rows);
    const uint64_t key = table.key;
    const int64_t from = ring(begin);
    if (lookup.block <= table.dim) {
      for (int64_t i = 0; i < kAhead; ++i) keys[i] = key + rows[i] * kRow;
      for (int block = 0; block < kBlocks; ++block)
        starts(lookup, keys, static_cast<uint64_t>(block) * kBlock, slots_[block] + from);
    } else {  // whole rows lie in a block here: there is one piece to a row
      const uint64_t dim = static_cast<uint64_t>(table.dim);
      const uint64_t block = static_cast<uint64_t>(lookup.block);
      for (int64_t i = 0; i < kAhead; ++i) keys[i] = key + rows[i] * dim / block * kBlock;
      int64_t* const slots = slots_[0] + from;
      starts(lookup, keys, 0, slots);
      for (int64_t i = 0; i < kAhead; ++i) {
        slots[i] += static_cast<int64_t>(rows[i] * dim % block);
        slots[i] -= slots[i] >= lookup.size ? lookup.size : 0;
      }
    }
    if (kSign)
      for (int word = 0; word < kWords; ++word) {
        const uint64_t base = (key ^ kSigns) + static_cast<uint64_t>(word) * kBlock;
        uint64_t* const signs = signs_[word] + from;
        for (int64_t i = 0; i < kAhead; ++i) signs[i] = mix(base + rows[i] * kRow);
      }
  }

  // A whole group by vectors: single numbers would have to leave the processor's queue of writes,
  // behind all of the result, before they could be read as a vector.
  template <typename Id>
  static void copy(const Id* ids, int64_t count, uint64_t* rows) {
    if (count == kAhead)
      for (int64_t i = 0; i < kAhead; ++i) rows[i] = static_cast<uint64_t>(int64_t{ids[i]});
    else
      for (int64_t i = 0; i < count; ++i) rows[i] = static_cast<uint64_t>(int64_t{ids[i]});
  }

  // start_of for every key of a group.
  static void starts(const Lookup& lookup, const uint64_t* keys, uint64_t plus, int64_t* slots) {
    const uint64_t size = static_cast<uint64_t>(lookup.size);
    if (size >> 32 != 0) {
      for (int64_t i = 0; i < kAhead; ++i) slots[i] = start_of(lookup, keys[i] + plus, 0);
      return;
    }
    // The product's high half from products of 32 bits, of which vectors have instructions.
    for (int64_t i = 0; i < kAhead; ++i) {
      const uint64_t x = mix(keys[i] + plus);
      slots[i] = static_cast<int64_t>(((x >> 32) * size + ((x & 0xFFFFFFFF) * size >> 32)) >> 32);
    }
  }

  const Part& part_;
  const float* const array_;
  const int64_t begin_;
  int64_t hashed_;
  const int64_t end_;
  alignas(64) int64_t slots_[kBlocks][kRing];
  alignas(64) uint64_t signs_[kWords][kRing];
};

template <int kRow_, int kBlock_, bool kSign>
struct Straight {
  using Rows = Ahead<kRow_, kBlock_, kSign>;

  static void forward(const Part& part, const float* array, float* result) {
    const Lookup& lookup = part.lookup;
    const Begins begins(part);
    const int64_t last = lookup.size - kBlock_ * kWidth;
    // Then nothing is read before it is written, and the array stays in the cache.
    const bool past = part.past_caches && lookup.mode == SLIPSTREAM_SUM &&
                      (reinterpret_cast<uintptr_t>(result + part.column) | lookup.width * 4) %
                              sizeof(Floats) == 0;
    int64_t place = begins.of(part.first);
    Rows rows(part, array, place, begins.of(part.last));
    for (int64_t bag = part.first; bag < part.last; ++bag) {
      Floats sum[kRow_];
      for (int v = 0; v < kRow_; ++v) sum[v] = Floats::all(0);
      float* const y = result + bag * lookup.width + part.column;
      if (!past && bag + kWritten < part.last)
        for (int v = 0; v < kRow_; ++v)
          __builtin_prefetch(y + kWritten * lookup.width + v * kWidth, 1);
      int64_t found = 0;
      for (const int64_t end = begins.of(bag + 1); place < end; ++place) {
        const int64_t at = rows.find(place);
        const int64_t id = id_at(lookup, place);
        if (id == part.table.padding) continue;
        ++found;
        const Floats weight = Floats::all(weight_at(lookup, place));
        if (__builtin_expect(rows.furthest(at) > last, 0)) {
          float whole[kRow_ * kWidth];
          add_row(part, id, 1.0f, array, whole, First());
          for (int v = 0; v < kRow_; ++v)
            sum[v] = sum[v].plus(Floats::load(whole + v * kWidth).times(weight));
          continue;
        }
        for (int v = 0; v < kRow_; ++v) {
          const float* const from = array + rows.slot(at, v / kBlock_);
          const Floats x = Floats::load(from + v % kBlock_ * kWidth);
          sum[v] = sum[v].plus(rows.signed_vector(at, v, x).times(weight));
        }
      }
      if (past) {
        for (int v = 0; v < kRow_; ++v) sum[v].stream(y + v * kWidth);
        continue;
      }
      for (int v = 0; v < kRow_; ++v) sum[v].store(y + v * kWidth);
      if (lookup.mode == SLIPSTREAM_MEAN && found > 1) divide(y, kRow_ * kWidth, found);
    }
    if (past) Floats::streamed();
  }

  static void backward(const Part& part, const float* given, float scale, float* gradient,
                       int64_t begin, int64_t end) {
    const Lookup& lookup = part.lookup;
    const Begins begins(part);
    int64_t place = begins.of(part.first);
    Rows rows(part, gradient, place, begins.of(part.last));
    const int64_t last = end - kBlock_ * kWidth;
    for (int64_t bag = part.first; bag < part.last; ++bag) {
      const int64_t stop = begins.of(bag + 1);
      const float factor = factor_of(part, place, stop, scale);
      const float* const y = given + bag * lookup.width + part.column;
      for (; place < stop; ++place) {
        const int64_t at = rows.find(place);
        const int64_t id = id_at(lookup, place);
        if (id == part.table.padding) continue;
        const float own = factor * weight_at(lookup, place);
        bool within = rows.furthest(at) <= last;
        for (int block = 0; block < Rows::kBlocks; ++block) within &= rows.slot(at, block) >= begin;
        if (__builtin_expect(!within, 0)) {
          scatter_row(part, id, own, y, gradient, begin, end);
          continue;
        }
        const Floats factors = Floats::all(own);
        for (int v = 0; v < kRow_; ++v) {
          float* const to = gradient + rows.slot(at, v / kBlock_);
          const Floats x = Floats::load(y + v * kWidth).times(factors);
          Sum()(to + v % kBlock_ * kWidth, rows.signed_vector(at, v, x));
        }
      }
    }
  }
};

// Calls body(Straight<...>) where the shape has one, and says whether it did.
template <int kRow_, int kBlock_, typename Body>
bool with_sign(const Part& part, Body body) {
  if (part.lookup.sign)
    body(Straight<kRow_, kBlock_, true>());
  else
    body(Straight<kRow_, kBlock_, false>());
  return true;
}

template <int kRow_, typename Body>
bool with_block(const Part& part, Body body) {
  const int64_t block = smaller(part.lookup.block, part.table.dim);
  if (block == kRow_ * kWidth) return with_sign<kRow_, kRow_>(part, body);
  if (kRow_ >= 2 && block == kRow_ / 2 * kWidth)
    return with_sign<kRow_, kRow_ >= 2 ? kRow_ / 2 : 1>(part, body);
  if (kRow_ >= 4 && block == kRow_ / 4 * kWidth)
    return with_sign<kRow_, kRow_ >= 4 ? kRow_ / 4 : 1>(part, body);
  if (kRow_ >= 8 && block == kRow_ / 8 * kWidth)
    return with_sign<kRow_, kRow_ >= 8 ? kRow_ / 8 : 1>(part, body);
  if (kRow_ >= 16 && block == kRow_ / 16 * kWidth)
    return with_sign<kRow_, kRow_ >= 16 ? kRow_ / 16 : 1>(part, body);
  return false;
}

template <typename Body>
bool straight(const Part& part, Body body) {
  const Lookup& lookup = part.lookup;
  const int64_t dim = part.table.dim;
  if (lookup.mode == SLIPSTREAM_MAX || lookup.count == 0) return false;
  if (lookup.block > dim && lookup.block % dim != 0) return false;
  if (dim == kWidth) return with_block<1>(part, body);
  if (dim == 2 * kWidth) return with_block<2>(part, body);
  if (dim == 4 * kWidth) return with_block<4>(part, body);
  if (dim == 8 * kWidth) return with_block<8>(part, body);
  if (dim == 16 * kWidth) return with_block<16>(part, body);
  return false;
}

void forward(const Part& part, const float* array, float* result) {
  const bool done =
      straight(part, [&](auto way) { decltype(way)::forward(part, array, result); });
  if (!done) forward_by_pieces(part, array, result);
}

void backward(const Part& part, const float* given, float scale, const float* array,
              const float* result, float* gradient, int64_t begin, int64_t end) {
  const bool done = straight(part, [&](auto way) {
    decltype(way)::backward(part, given, scale, gradient, begin, end);
  });
  if (!done) backward_by_pieces(part, given, scale, array, result, gradient, begin, end);
}

}  // namespace
}  // namespace robe
}  // namespace slipstream
