// Structures from Python objects: runs the decision tree of a model's reads for every node.

#include <cstring>
#include <new>
#include <vector>

#include "slipstream/recursive.h"

namespace slipstream {
namespace {

constexpr int kRegisters = 64;

struct Arrays {
  std::vector<int32_t> kind, word, child, roots;
  std::vector<int64_t> offset{0};
};

// Numbers of objects by address: open addressing, at most half full.
class Memo {
 public:
  Memo() : slots_(256), mask_(255) {}
  // The number of `object`, or `number` if it is new.
  int32_t find_or_add(void *object, int32_t number) {
    if (2 * (used_ + 1) > slots_.size()) grow();
    Slot &slot = at(object);
    if (slot.object == nullptr) {
      slot = {object, number};
      ++used_;
    }
    return slot.number;
  }

 private:
  struct Slot {
    void *object = nullptr;
    int32_t number = 0;
  };
  Slot &at(void *object) {
    uint64_t hash = reinterpret_cast<uintptr_t>(object) >> 4;
    hash *= 0x9E3779B97F4A7C15u;
    for (uint64_t i = hash >> 32;; ++i) {
      Slot &slot = slots_[i & mask_];
      if (slot.object == nullptr || slot.object == object) return slot;
    }
  }
  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    for (const Slot &slot : old)
      if (slot.object != nullptr) at(slot.object) = slot;
  }
  std::vector<Slot> slots_;
  uint64_t mask_;
  size_t used_ = 0;
};

class Reader {
 public:
  Reader(slipstream_read_args &args, Arrays &arrays)
      : args_(args), py_(*args.python), out_(arrays) {}

  int32_t run() {
    for (int64_t i = 0; i < args_.root_count; ++i) out_.roots.push_back(number(args_.roots[i]));
    for (size_t node = 0; node < nodes_.size(); ++node) {
      const int32_t status = visit(nodes_[node]);
      while (held_ > 0) py_.release(values_[--held_]);
      if (status != SLIPSTREAM_OK) {
        args_.bad_node = static_cast<int64_t>(node);
        return status;
      }
    }
    return SLIPSTREAM_OK;
  }

 private:
  // Nodes are kept alive by the list, so that no other object has the address of one.
  int32_t number(void *object) {
    const int32_t next = static_cast<int32_t>(nodes_.size());
    const bool integer = is_integer(object);  // equal ones may be one object, but are other nodes
    const int32_t found = integer ? next : memo_.find_or_add(object, next);
    if (found == next) {
      nodes_.push_back(object);
      py_.list_append(args_.nodes, object);
    }
    return found;
  }

  bool is_integer(void *object) {
    void *const type = py_.type_of(object);
    py_.release(type);
    return type == py_.integer;
  }

  void *hold(void *value) {
    if (value != nullptr) values_[held_++] = value;
    return value;
  }

  void *read(int access, void *parent, int32_t key) {
    if (access == SLIPSTREAM_READ_ATTR) return hold(py_.get_attr(parent, args_.keys[key]));
    if (access == SLIPSTREAM_READ_ITEM) return hold(py_.get_item(parent, key));
    void *const method = hold(py_.get_attr(parent, args_.keys[key]));
    return method == nullptr ? nullptr : hold(py_.call(method));
  }

  bool passes(void *value, const int32_t *test) {
    switch (test[0]) {
      case SLIPSTREAM_TEST_OBJECT: return value == args_.keys[test[1]];
      case SLIPSTREAM_TEST_VALUE: return is_integer(value) && py_.as_long(value) == test[1];
      case SLIPSTREAM_TEST_INTEGER: return is_integer(value);
      default: break;
    }
    void *const type = py_.type_of(value);
    py_.release(type);
    return type == args_.keys[test[1]] && (test[2] < 0 || py_.size(value) == test[2]);
  }

  int32_t visit(void *node) {
    void *registers[kRegisters];
    registers[0] = node;
    const int32_t *at = args_.code;
    while (at[0] >= 0) {
      void *value = node;
      if (at[0] != SLIPSTREAM_READ_SELF) value = read(at[0], registers[at[1]], at[2]);
      if (value == nullptr) return SLIPSTREAM_READ_ERROR;
      registers[at[3]] = value;
      const int32_t *test = at + 5, *const end = test + 4 * at[4];
      while (test < end && !passes(value, test)) test += 4;
      if (test == end) return SLIPSTREAM_READ_UNKNOWN;
      at = args_.code + test[3];
    }
    out_.kind.push_back(at[1]);
    long word = 0;
    if (at[2] >= 0) {
      word = py_.as_long(registers[at[2]]);
      if (word == -1 && py_.error() != nullptr) return SLIPSTREAM_READ_ERROR;
      if (word != static_cast<int32_t>(word)) word = -1;  // out of any vocabulary
    }
    out_.word.push_back(static_cast<int32_t>(word));
    for (int32_t c = 0; c < at[3]; ++c) out_.child.push_back(number(registers[at[4 + c]]));
    out_.offset.push_back(static_cast<int64_t>(out_.child.size()));
    return SLIPSTREAM_OK;
  }

  slipstream_read_args &args_;
  const slipstream_python &py_;
  Arrays &out_;
  Memo memo_;
  std::vector<void *> nodes_;
  void *values_[2 * kRegisters];
  int held_ = 0;
};

}  // namespace
}  // namespace slipstream

extern "C" int32_t slipstream_read(slipstream_read_args *args) {
  args->handle = nullptr;
  args->bad_node = -1;
  args->nodes = args->python->list_new(0);
  if (args->nodes == nullptr) return SLIPSTREAM_READ_ERROR;
  slipstream::Arrays *arrays = nullptr;
  int32_t status = SLIPSTREAM_NO_MEMORY;
  try {
    arrays = new slipstream::Arrays();
    status = slipstream::Reader(*args, *arrays).run();
  } catch (const std::bad_alloc &) {
    status = SLIPSTREAM_NO_MEMORY;
  }
  if (status != SLIPSTREAM_OK) {
    delete arrays;
    return status;
  }
  args->count = static_cast<int64_t>(arrays->kind.size());
  args->edges = static_cast<int64_t>(arrays->child.size());
  args->handle = arrays;
  return SLIPSTREAM_OK;
}

extern "C" void slipstream_read_take(void *handle, int32_t *kind, int32_t *word, int64_t *offset,
                                     int32_t *child, int32_t *roots) {
  auto *const arrays = static_cast<slipstream::Arrays *>(handle);
  const auto copy = [](auto *to, const auto &from) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size() * sizeof(from[0]));
  };
  copy(kind, arrays->kind);
  copy(word, arrays->word);
  copy(offset, arrays->offset);
  copy(child, arrays->child);
  copy(roots, arrays->roots);
  delete arrays;
}
