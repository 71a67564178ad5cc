// A program that grows and shrinks at its end, with the values of all its functions.

#pragma once

#include <cstring>
#include <vector>

#include "synthesis/kernel.h"

namespace slipstream {
namespace synthesis {

using Task = slipstream_synthesis_task;
constexpr int kLength = SLIPSTREAM_SYNTHESIS_LENGTH;

struct Hash {
  uint64_t a, b;
};

inline uint64_t mix(uint64_t h, uint64_t v) {
  h ^= v * 0x9E3779B97F4A7C15u;
  return (h << 31 | h >> 33) * 0xBF58476D1CE4E5B9u;
}

inline Hash mix(Hash h, Hash v) { return {mix(h.a, v.a), mix(h.b, v.b + (v.a >> 7))}; }

class Path {
 public:
  Path(const Kernel& kernel, const Task& task)
      : kernel_(kernel), task_(task), frames_(kLength + 3), hashes_(kLength + 3) {
    required_ = static_cast<uint32_t>((uint64_t{1} << task.examples) - 1);
    for (int e = 0; e < task.inputs; ++e) {
      frame(2).number[e] = task.numbers[e];
      for (int which = 0; which < 2; ++which) {
        const int row = 2 * e + which;
        std::memcpy(frame(which).list[e], task.lists + row * kMax, sizeof(int16_t) * kMax);
        frame(which).count[e] = task.counts[row];
      }
    }
    hash_list(0), hash_list(1), hash_numbers(2);
    places_[0] = {2, 0, 1, 0};
  }

  int length() const { return length_; }
  const uint8_t* functions() const { return functions_; }
  bool valid(int e) const { return !(places_[length_].invalid >> e & 1); }
  void shorten(int length) { length_ = length; }

  // Whether the program is valid on the examples with another function.
  bool extend(int f) {
    const Place& from = places_[length_];
    const int slot = length_ + 3;
    const uint32_t invalid =
        from.invalid | kernel_.functions[f](arguments(), frame(slot), 0, task_.inputs);
    if (invalid & required_) return false;
    functions_[length_++] = static_cast<uint8_t>(f);
    if (f < kNumbers)
      places_[length_] = {slot, from.last, from.before, invalid};
    else
      places_[length_] = {from.number, slot, from.last, invalid};
    return true;
  }

  // Whether the program with another function, which is not kept, meets all examples.
  bool meets(int f) {
    Frame& to = frame(length_ + 3);
    for (int e = 0; e < task_.examples; ++e) {
      const int16_t* wanted = task_.wanted + e * kMax;
      if (kernel_.functions[f](arguments(), to, e, e + 1) ||
          (task_.is_list ? to.count[e] != task_.wanted_counts[e] ||
                               std::memcmp(to.list[e], wanted, sizeof(int16_t) * kMax) != 0
                         : to.number[e] != *wanted))
        return false;
    }
    return true;
  }

  // Of everything that later functions can read.
  Hash state() {
    const Place& place = places_[length_];
    const int slot = length_ + 2;
    if (length_ > 0) functions_[length_ - 1] < kNumbers ? hash_numbers(slot) : hash_list(slot);
    Hash h = {place.invalid, 1};
    for (int read : {place.number, place.last, place.before})
      h = mix(h, hashes_[static_cast<size_t>(read)]);
    return h;
  }

  const Frame& result() const { return frames_[static_cast<size_t>(length_ + 2)]; }

 private:
  struct Place {
    int number, last, before;
    uint32_t invalid;
  };

  Frame& frame(int slot) { return frames_[static_cast<size_t>(slot)]; }

  Arguments arguments() {
    const Place& place = places_[length_];
    return {&frame(place.number), &frame(place.last), &frame(place.before)};
  }

  void hash_list(int slot) {
    Hash h = {2, 3};
    for (int e = 0; e < task_.inputs; ++e) {
      uint64_t words[kMax / 4];
      std::memcpy(words, frame(slot).list[e], sizeof words);
      uint64_t count = static_cast<uint64_t>(frame(slot).count[e]);
      h = mix(h, {count, count});
      for (int i = 0; i < kMax / 4 && static_cast<int>(count) > 4 * i; ++i)
        h = mix(h, {words[i], words[i]});
    }
    hashes_[static_cast<size_t>(slot)] = h;
  }

  void hash_numbers(int slot) {
    Hash h = {5, 7};
    for (int e = 0; e < task_.inputs; ++e) {
      const uint64_t word = static_cast<uint16_t>(frame(slot).number[e]);
      h = mix(h, {word, word});
    }
    hashes_[static_cast<size_t>(slot)] = h;
  }

  const Kernel& kernel_;
  const Task& task_;
  uint32_t required_;
  int length_ = 0;
  uint8_t functions_[kLength] = {};
  Place places_[kLength + 1];
  std::vector<Frame> frames_;
  std::vector<Hash> hashes_;
};

}  // namespace synthesis
}  // namespace slipstream
