// Requests from OpenTelemetry spans in protobuf's wire format (OTLP).

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "slipstream/cache.h"

namespace slipstream {
namespace cache {
namespace {

using Text = std::string_view;
constexpr size_t kMaxCallers = 33;

// Distinct texts, numbered in order of appearance.
class Numbers {
 public:
  // A `temporary` text is copied if it is new; others must outlive this object.
  int32_t of(Text text, bool temporary = false) {
    const auto known = numbers_.find(text);
    if (known != numbers_.end()) return known->second;
    if (temporary) text = copies_.emplace_back(text);
    items.push_back(text);
    return numbers_.emplace(text, static_cast<int32_t>(items.size() - 1)).first->second;
  }
  std::vector<Text> items;

 private:
  std::unordered_map<Text, int32_t> numbers_;
  std::deque<std::string> copies_;
};

using Id = std::array<uint64_t, 3>;  // trace and span
struct HashOfId {
  size_t operator()(const Id &id) const {
    const uint64_t hash = (id[0] ^ id[1] * 0x9e3779b97f4a7c15u ^ id[2]) * 0x9e3779b97f4a7c15u;
    return static_cast<size_t>(hash ^ hash >> 32);
  }
};
Id id_of(Text trace, Text span) {
  Id id;
  std::memcpy(id.data(), trace.data(), 16);
  std::memcpy(&id[2], span.data(), 8);
  return id;
}

const char *end_of(Text text) { return text.data() + text.size(); }
template <class Word>
Text bytes_of(const std::vector<Word> &words) {
  return {reinterpret_cast<const char *>(words.data()), words.size() * sizeof(Word)};
}

struct Damage {
  const char *at;
  int64_t kind;
  const char *end = nullptr;  // of the message
};
struct Stop {};  // at the first damage

class Spans {
 public:
  Spans(Text file, const char *keys, int32_t object_keys, bool skip)
      : file_(file), object_keys_(object_keys), skip_(skip) {
    for (; *keys != 0; keys += std::strlen(keys) + 1) key_count_ = 1 + tables_[kWords].of(keys);
  }

  void run() {
    try {
      guarded([&] { file_.empty() || file_[0] != 0 ? message(file_) : framed_messages(); });
      link();
    } catch (const Stop &) {
    }
    finish();
  }

  // What Python reads, see `slipstream_otlp_result`.
  std::vector<std::string> results;

 private:
  enum { kWords, kValues, kObjects, kAttributes, kContexts, kTables };
  enum { kCut, kMalformed, kTraceId, kSpanId, kTime, kSize };
  struct Pair {
    Text text, value;     // the attribute, and its AnyValue
    int32_t key, number;  // of the value; -1 until it is needed
  };
  struct Span {
    Text trace, parent, object;  // object: null unless the span is a request
    int64_t time, size;
    int32_t name, attributes;
  };

  void finish() {
    for (const Numbers &table : tables_) {
      std::vector<int64_t> ends;
      std::string items;
      for (const Text item : table.items) {
        items += item;
        ends.push_back(static_cast<int64_t>(items.size()));
      }
      results.insert(results.end(), {std::string(bytes_of(ends)), items});
    }
    for (const auto &rows : {requests_, damage_, std::vector<int64_t>{duplicates_}}) {
      results.emplace_back(bytes_of(rows));
    }
  }

  void note(const Damage &found) {
    if (cut_ != nullptr && found.end == end_of(file_)) return;  // noted by frame()
    damage_.insert(damage_.end(), {found.at - file_.data(), found.kind});
    if (!skip_) throw Stop();
  }
  template <class Body>
  void guarded(Body body) {
    try {
      body();
    } catch (const Damage &found) {
      note(found);
    }
  }

  static uint64_t varint(const char *&at, const char *end) {
    const char *const begin = at;
    uint64_t value = 0;
    for (int shift = 0; at < end && shift < 64; shift += 7) {
      value |= static_cast<uint64_t>(*at & 127) << shift;
      if (static_cast<int8_t>(*at++) >= 0) return value;
    }
    throw Damage{begin, at < end ? kMalformed : kCut, end};
  }

  // A message of `length` bytes. If the file ends within it, that is noted once.
  Text frame(const char *at, const char *end, uint64_t length, const char *start) {
    const size_t room = static_cast<size_t>(end - at);
    if (length <= room) return {at, static_cast<size_t>(length)};
    if (end != end_of(file_) || !skip_) throw Damage{start, kCut};
    note({start, kCut, end});
    cut_ = at;
    return {at, room};
  }

  // Calls visit(number, bytes, value) for each field; the bytes of a number are null.
  template <class Visit>
  void fields(Text message, Visit visit) {
    const char *const end = end_of(message);
    for (const char *at = message.data(); at < end;) {
      const char *const start = at;
      const uint64_t tag = varint(at, end), number = tag >> 3, type = tag & 7;
      if (number == 0 || number >> 29 != 0) throw Damage{start, kMalformed};
      if (type == 2) {
        const uint64_t length = varint(at, end);
        const Text bytes = frame(at, end, length, start);
        at = end_of(bytes);
        visit(number, bytes, uint64_t{0});
      } else if (type == 0) {
        visit(number, Text(), varint(at, end));
      } else if (type == 1 || type == 5) {
        const ptrdiff_t width = type == 1 ? 8 : 4;
        if (end - at < width) throw Damage{start, kCut, end};
        uint64_t value = 0;
        std::memcpy(&value, at, width);
        at += width;
        visit(number, Text(), value);
      } else {
        throw Damage{start, kMalformed};
      }
    }
  }
  template <class Visit>
  void messages(Text text, uint64_t number, Visit visit) {
    fields(text, [&](uint64_t field, Text bytes, uint64_t) {
      if (field == number && bytes.data() != nullptr) visit(bytes);
    });
  }

  // As the collector's file exporter writes them: each after four bytes of length.
  void framed_messages() {
    for (const char *at = file_.data(); at < end_of(file_);) {
      if (end_of(file_) - at < 4) throw Damage{at, kCut};
      uint64_t length = 0;
      for (int n = 0; n < 4; ++n) length = length << 8 | static_cast<uint8_t>(at[n]);
      const Text framed = frame(at + 4, end_of(file_), length, at);
      guarded([&] { message(framed); });
      at = end_of(framed);
    }
  }
  void message(Text text) {
    messages(text, 1, [&](Text group) {
      guarded([&] {
        shared_.clear();
        messages(group, 1, [&](Text resource) {
          messages(resource, 1, [&](Text pair) { shared_.push_back(attribute(pair)); });
        });
        messages(group, 2, [&](Text scope) {
          guarded([&] {
            messages(scope, 2, [&](Text one) { guarded([&] { span(one); }); });
          });
        });
      });
    });
  }

  Pair attribute(Text text) {
    Text key, value;
    fields(text, [&](uint64_t number, Text bytes, uint64_t) {
      if (number == 1) key = bytes;
      if (number == 2) value = bytes;
    });
    fields(value, [](uint64_t, Text, uint64_t) {});  // is whole
    return {text, value, tables_[kWords].of(key), -1};
  }

  void span(Text text) {
    if (text.data() == cut_) return;
    Span found{};
    Text id, name;
    size_t count = 0;
    fields(text, [&](uint64_t number, Text bytes, uint64_t value) {
      if (number == 1) found.trace = bytes;
      if (number == 2) id = bytes;
      if (number == 4) found.parent = bytes;
      if (number == 5) name = bytes;
      if (number == 7) found.time = static_cast<int64_t>(value);
      if (number != 9) return;
      // Most attributes equal those of the span before.
      if (count == last_.size()) last_.push_back(attribute(bytes));
      if (last_[count].text != bytes) last_[count] = attribute(bytes);
      ++count;
    });
    if (found.trace.size() != 16) return note({text.data(), kTraceId});
    if (id.size() != 8 || (found.parent.size() != 8 && !found.parent.empty())) {
      return note({text.data(), kSpanId});
    }
    if (!ids_.emplace(id_of(found.trace, id), static_cast<int32_t>(spans_.size())).second) {
      ++duplicates_;
      return;
    }
    found.name = tables_[kWords].of(name);
    Pair *object = nullptr, *size = nullptr;
    const auto each = [&](auto visit) {
      for (Pair &pair : shared_) visit(pair);
      for (size_t n = 0; n < count; ++n) visit(last_[n]);
    };
    each([&](Pair &pair) {  // of several with one key the last one counts
      Pair *&best = pair.key < object_keys_ ? object : size;
      if (pair.key < key_count_ && (best == nullptr || pair.key <= best->key)) best = &pair;
    });
    found.size = size == nullptr ? 1 : size_of(size->value);
    if (object != nullptr && found.time < 0) {
      note({text.data(), kTime});
    } else if (object != nullptr && found.size < 0) {
      note({text.data(), kSize});
    } else if (object != nullptr) {
      found.object = object->value.data() == nullptr ? Text("") : object->value;
      words_.clear();
      each([&](Pair &pair) {
        if (pair.key == object->key || (size != nullptr && pair.key == size->key)) return;
        if (pair.number < 0) pair.number = tables_[kValues].of(pair.value);
        words_.insert(words_.end(), {pair.key, pair.number});
      });
      found.attributes = tables_[kAttributes].of(bytes_of(words_), true);
    }
    spans_.push_back(found);
  }

  // An integer, or the decimal digits of one; negative if it is neither.
  int64_t size_of(Text any) {
    int64_t size = -1;
    fields(any, [&](uint64_t number, Text digits, uint64_t value) {
      const bool decimal = digits.find_first_not_of("0123456789") == Text::npos;
      const bool fits = number == 3 ? digits.data() == nullptr
                                    : number == 1 && decimal && digits.size() - 1 < 18;
      for (const char digit : digits) value = 10 * value + static_cast<uint64_t>(digit - '0');
      size = fits ? static_cast<int64_t>(value) : -1;
    });
    return size <= int64_t{1} << 56 ? size : -1;
  }

  void link() {
    std::vector<int32_t> order;
    for (size_t n = 0; n < spans_.size(); ++n) {
      if (spans_[n].object.data() != nullptr) order.push_back(static_cast<int32_t>(n));
    }
    // Spans are written when they end.
    const auto earlier = [&](int32_t a, int32_t b) { return spans_[a].time < spans_[b].time; };
    if (!std::is_sorted(order.begin(), order.end(), earlier)) {
      std::stable_sort(order.begin(), order.end(), earlier);
    }
    requests_.reserve(4 * order.size());
    for (const int32_t first : order) {
      const Span &request = spans_[first];
      words_ = {request.attributes, request.name};
      // The limit ends cycles, and paths that are deeper than is informative.
      for (const Span *at = &request; !at->parent.empty() && words_.size() <= kMaxCallers;) {
        const auto caller = ids_.find(id_of(at->trace, at->parent));
        if (caller == ids_.end() || caller->second == first) break;
        at = &spans_[caller->second];
        words_.push_back(at->name);
      }
      requests_.insert(requests_.end(),
                      {request.time, request.size, tables_[kObjects].of(request.object),
                       tables_[kContexts].of(bytes_of(words_), true)});
    }
  }

  const Text file_;
  const int32_t object_keys_;
  const bool skip_;
  const char *cut_ = nullptr;  // the innermost message that the end of the file cuts off
  int32_t key_count_ = 0;
  Numbers tables_[kTables];
  std::vector<int64_t> requests_, damage_;
  int64_t duplicates_ = 0;
  std::unordered_map<Id, int32_t, HashOfId> ids_;
  std::vector<Span> spans_;
  std::vector<Pair> shared_, last_;  // attributes of the resource, and of spans
  std::vector<int32_t> words_;
};

}  // namespace
}  // namespace cache
}  // namespace slipstream

using slipstream::cache::Spans;

extern "C" {

void *slipstream_otlp_read(const char *bytes, int64_t size, const char *keys, int32_t object_keys,
                           int32_t skip_bad) {
  try {
    auto spans = std::make_unique<Spans>(std::string_view(bytes, size), keys, object_keys, skip_bad);
    spans->run();
    return spans.release();
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void slipstream_otlp_free(void *spans) { delete static_cast<Spans *>(spans); }

const char *slipstream_otlp_result(void *spans, int32_t number, int64_t *size) {
  const std::string &result = static_cast<Spans *>(spans)->results[number];
  *size = static_cast<int64_t>(result.size());
  return result.data();
}

}  // extern "C"
