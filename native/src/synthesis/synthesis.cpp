// Which kernels this build has; running many programs; the search of all short programs.

#include <algorithm>
#include <chrono>
#include <new>

#include "synthesis/path.h"
#include "threads.h"

namespace slipstream {
namespace synthesis {

#define KERNELS "synthesis_kernels.inc"
#include "registry.inc"

namespace {

using Search = slipstream_synthesis_search;

// Programs that a thread takes at a time.
constexpr int64_t kTogether = 4096;
// Evaluations between two readings of the clock.
constexpr int64_t kBetweenClocks = 1 << 16;

bool consistent(const Task& task) {
  if (task.inputs < 1 || task.inputs > kExamples || task.examples < 0) return false;
  for (int row = 0; row < 2 * task.inputs; ++row)
    if (task.counts[row] < 0 || task.counts[row] > kMax) return false;
  return task.examples <= task.inputs;
}

struct Batch {
  const Kernel& kernel;
  const Task& task;
  const uint8_t* programs;
  int64_t count;
  int length;
  uint8_t* valid;
  int16_t *lists, *counts;
};

void run_part(void* context, int64_t part) {
  const Batch& batch = *static_cast<const Batch*>(context);
  const int64_t end = std::min((part + 1) * kTogether, batch.count);
  Path path(batch.kernel, batch.task);
  for (int64_t n = part * kTogether; n < end; ++n) {
    const uint8_t* program = batch.programs + n * batch.length;
    path.shorten(0);
    bool valid = true;
    for (int k = 0; k < batch.length && valid; ++k) valid = path.extend(program[k]);
    batch.valid[n] = valid;
    for (int e = 0; batch.lists != nullptr && e < batch.task.inputs; ++e) {
      const int64_t row = n * batch.task.inputs + e;
      const bool is_list = program[batch.length - 1] >= kNumbers, known = valid && path.valid(e);
      const Frame& from = path.result();
      const int16_t list[kMax] = {from.number[e]};
      if (known)
        std::memcpy(batch.lists + row * kMax, is_list ? from.list[e] : list, sizeof list);
      batch.counts[row] = !known ? -2 : is_list ? from.count[e] : -1;
    }
  }
}

// States that were reached, with open addressing.
class Seen {
 public:
  Seen() : slots_(1 << 12) {}

  bool insert(Hash h) {
    h.a |= 1;  // zero marks a free slot
    if (2 * size_ >= slots_.size()) grow();
    const bool is_new = put(slots_, h);
    size_ += is_new;
    return is_new;
  }

 private:
  static bool put(std::vector<Hash>& slots, Hash h) {
    const size_t mask = slots.size() - 1;
    size_t at = (h.b ^ h.a >> 32) & mask;
    for (; slots[at].a; at = (at + 1) & mask)
      if (slots[at].a == h.a && slots[at].b == h.b) return false;
    slots[at] = h;
    return true;
  }

  void grow() {
    std::vector<Hash> larger(2 * slots_.size());
    for (const Hash& h : slots_)
      if (h.a) put(larger, h);
    slots_.swap(larger);
  }

  std::vector<Hash> slots_;
  size_t size_ = 0;
};

struct Node {
  int32_t parent;
  uint8_t function;
};

class Enumeration {
 public:
  Enumeration(const Kernel& kernel, const Task& task, Search& search)
      : task_(task), search_(search), path_(kernel, task), began_(Clock::now()) {}

  void run() {
    search_.candidates = search_.found = search_.complete = 0;
    levels_.push_back({{-1, 0}});
    seen_.insert(path_.state());
    int last = search_.max_length;
    for (int length = 1; length <= last; ++length) {
      if (!check(length - 1)) break;
      search_.complete = length;
      if (search_.found && last == search_.max_length)
        last = std::min(last, length + search_.extra);
      if (length < last && !expand(length - 1)) break;
    }
    search_.seconds = seconds();
  }

 private:
  using Clock = std::chrono::steady_clock;

  double seconds() const { return std::chrono::duration<double>(Clock::now() - began_).count(); }

  // Whether the search may go on.
  bool counted(int64_t number) {
    search_.candidates += number;
    if (search_.candidates > search_.max_candidates) return false;
    if ((waited_ += number) < kBetweenClocks) return true;
    waited_ = 0;
    return seconds() < search_.max_seconds;
  }

  // The program of a node, with as much as possible of the one before.
  void go_to(int level, int32_t node) {
    uint8_t functions[kLength];
    for (int k = level; k > 0; --k) {
      const Node& at = levels_[static_cast<size_t>(k)][static_cast<size_t>(node)];
      functions[k - 1] = at.function;
      node = at.parent;
    }
    int same = 0;
    const int known = std::min(level, path_.length());
    while (same < known && path_.functions()[same] == functions[same]) ++same;
    path_.shorten(same);
    for (int k = same; k < level; ++k) {
      path_.extend(functions[k]);
      path_.state();  // hashes the new values
    }
  }

  // Tries all functions behind the programs of a level that may meet the examples.
  bool check(int level) {
    const int first = task_.is_list ? kNumbers : 0, end = task_.is_list ? kFunctions : kNumbers;
    const auto& nodes = levels_[static_cast<size_t>(level)];
    for (size_t node = 0; node < nodes.size(); ++node) {
      go_to(level, static_cast<int32_t>(node));
      for (int f = first; f < end; ++f)
        if (path_.meets(f)) add(f);
      if (!counted(end - first)) return false;
    }
    return true;
  }

  void add(int f) {
    if (search_.found == search_.capacity) return;
    uint8_t* row = search_.programs + search_.found * kLength;
    std::memcpy(row, path_.functions(), static_cast<size_t>(path_.length()));
    row[path_.length()] = static_cast<uint8_t>(f);
    search_.lengths[search_.found++] = path_.length() + 1;
  }

  bool expand(int level) {
    levels_.emplace_back();
    const auto& nodes = levels_[static_cast<size_t>(level)];
    auto& next = levels_.back();
    const int unchecked = task_.is_list ? kNumbers : kFunctions - kNumbers;
    for (size_t node = 0; node < nodes.size(); ++node) {
      go_to(level, static_cast<int32_t>(node));
      for (int f = 0; f < kFunctions; ++f) {
        if (!path_.extend(f)) continue;
        if (seen_.insert(path_.state()))
          next.push_back({static_cast<int32_t>(node), static_cast<uint8_t>(f)});
        path_.shorten(level);
      }
      if (!counted(unchecked)) return false;
    }
    return true;
  }

  const Task& task_;
  Search& search_;
  Path path_;
  Clock::time_point began_;
  int64_t waited_ = 0;
  Seen seen_;
  std::vector<std::vector<Node>> levels_;
};

}  // namespace
}  // namespace synthesis
}  // namespace slipstream

using namespace slipstream::synthesis;

extern "C" {

int32_t slipstream_synthesis_kernel_count(void) { return kCount; }

const char* slipstream_synthesis_level(int32_t kernel) {
  return known(kernel) ? kKernels[kernel]->level : "";
}

int32_t slipstream_synthesis_run(int32_t kernel, const Task* task, const uint8_t* programs,
                                 int64_t count, int32_t length, uint8_t* valid, int16_t* lists,
                                 int16_t* counts, int32_t threads) {
  if (!known(kernel) || !consistent(*task) || length < 1 || length > kLength || count < 0)
    return SLIPSTREAM_INVALID;
  for (int64_t k = 0; k < count * length; ++k)
    if (programs[k] >= kFunctions) return SLIPSTREAM_INVALID;
  Batch batch{*kKernels[kernel], *task, programs, count, length, valid, lists, counts};
  slipstream::parallel_for((count + kTogether - 1) / kTogether, threads, run_part, &batch);
  return SLIPSTREAM_OK;
}

int32_t slipstream_synthesis_enumerate(int32_t kernel, const Task* task, Search* search) {
  if (!known(kernel) || !consistent(*task) || task->examples < 1 || search->max_length < 1 ||
      search->max_length > kLength)
    return SLIPSTREAM_INVALID;
  try {
    Enumeration(*kKernels[kernel], *task, *search).run();
    return SLIPSTREAM_OK;
  } catch (const std::bad_alloc&) {
    return SLIPSTREAM_NO_MEMORY;
  }
}

}  // extern "C"
