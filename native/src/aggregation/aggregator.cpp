// The side that sums. See aggregation.h.

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "aggregation/datagram.h"
#include "internal.h"

namespace slipstream::aggregation {
namespace {

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

WIDE void add(float *sum, const float *term, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) sum[i] += term[i];
}
WIDE void add(double *sum, const double *term, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) sum[i] += term[i];
}
WIDE void add(uint32_t *sum, const uint32_t *term, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) sum[i] += term[i];
}

// One piece: what its members sent, then the sum over the first of them.
struct Slot {
  uint64_t sequence = 0;
  uint64_t seen = 0;  // members
  uint64_t length = 0;
  std::size_t bytes = 0;
  int32_t first = 0;  // member that began it
  uint8_t dtype = 0;
  bool begun = false, summed = false, done = false;
  uint16_t marked = 0;
  std::vector<uint8_t> data;  // [members * payload_bytes]
};

struct Job {
  std::vector<uint64_t> keys;
  std::vector<sockaddr_storage> address;
  std::vector<socklen_t> address_bytes;
  std::vector<Slot> slots;
  std::size_t payload_bytes = 0;
  uint64_t all = 0;
  sockaddr_storage parent{};
  socklen_t parent_bytes = 0;  // 0 at the root
  int32_t parent_member = 0;
  uint64_t parent_key = 0;
};

template <typename T>
void add_members(Slot &slot, std::size_t members, std::size_t stride) {
  for (std::size_t m = 1; m < members; ++m)
    add(reinterpret_cast<T *>(slot.data.data()),
        reinterpret_cast<const T *>(slot.data.data() + m * stride), slot.bytes / sizeof(T));
}

}  // namespace
}  // namespace slipstream::aggregation

using namespace slipstream::aggregation;

struct slipstream_aggregator {
  explicit slipstream_aggregator(int socket) : socket_(socket) {}

  std::mutex lock;
  std::unordered_map<int32_t, Job> jobs;
  int64_t counts[4] = {0, 0, 0, 0};

  bool serve(int32_t milliseconds, slipstream_mismatch *out) {
    const double until = now_s() + milliseconds * 1e-3;
    for (double left = milliseconds * 1e-3; left > 0.0; left = until - now_s()) {
      if (!readable(socket_, left)) continue;
      const int count = inbox_.receive(socket_);
      const std::lock_guard<std::mutex> guard(lock);
      bool equal = true;
      for (int i = 0; i < count && equal; ++i) equal = handle(i, out);
      outbox_.flush(socket_);
      if (!equal) return true;
    }
    return false;
  }

 private:
  // False if two members of a job differ.
  bool handle(int i, slipstream_mismatch *out) {
    Header header;
    ++counts[0];
    const auto found = inbox_.header(i, &header) ? jobs.find(header.job) : jobs.end();
    if (found == jobs.end()) return ++counts[1], true;
    Job &job = found->second;
    const std::size_t bytes = inbox_.payload_bytes(i);
    if (bytes > job.payload_bytes || bytes % size_of(header.dtype) != 0)
      return ++counts[1], true;
    Slot &slot = job.slots[header.sequence % job.slots.size()];
    if (header.kind != kPiece) {
      if (job.parent_bytes == 0 || header.key != job.parent_key) return ++counts[1], true;
      from_parent(job, slot, header, i);
      return true;
    }
    if (header.member < 0 || static_cast<std::size_t>(header.member) >= job.keys.size() ||
        header.key != job.keys[header.member])
      return ++counts[1], true;
    // Whoever knows the key is the member, also from another address.
    job.address[header.member] = inbox_.from[i];
    job.address_bytes[header.member] = inbox_.address_bytes(i);
    if (slot.begun && header.sequence < slot.sequence) return ++counts[2], true;
    if (!slot.begun || header.sequence > slot.sequence) {
      slot.data.resize(job.keys.size() * job.payload_bytes);
      slot.sequence = header.sequence, slot.length = header.length, slot.dtype = header.dtype;
      slot.bytes = bytes, slot.first = header.member, slot.seen = 0, slot.marked = 0;
      slot.begun = true, slot.summed = slot.done = false;
    } else if (slot.length != header.length || slot.dtype != header.dtype || slot.bytes != bytes) {
      *out = {header.job, header.member, slot.first, slot.dtype == header.dtype,
              static_cast<int64_t>(header.length), static_cast<int64_t>(slot.length)};
      return false;
    }
    // Later it would reach only members that have lost the result.
    if (!slot.summed && ((header.flags & kMarked) != 0 || inbox_.congested(i)))
      slot.marked = kMarked;
    const uint64_t bit = uint64_t{1} << header.member;
    if ((slot.seen & bit) != 0) {
      ++counts[2];
      if (slot.done)
        answer(header.job, job, slot, header.member, kResult, 0, 0);
      else if (slot.summed)
        to_parent(header.job, job, slot);
      else
        answer(header.job, job, slot, header.member, kWaiting, job.all & ~slot.seen, 0);
      return true;
    }
    std::memcpy(slot.data.data() + header.member * job.payload_bytes, inbox_.payload(i), bytes);
    slot.seen |= bit;
    if (slot.seen == job.all) sum(header.job, job, slot);
    return true;
  }

  // In the members' order, whatever the order of arrival.
  void sum(int32_t id, Job &job, Slot &slot) {
    ++counts[3];
    switch (slot.dtype) {
      case SLIPSTREAM_SUM_FLOAT32:
        add_members<float>(slot, job.keys.size(), job.payload_bytes);
        break;
      case SLIPSTREAM_SUM_FLOAT64:
        add_members<double>(slot, job.keys.size(), job.payload_bytes);
        break;
      default:
        add_members<uint32_t>(slot, job.keys.size(), job.payload_bytes);
    }
    slot.summed = true;
    slot.done = job.parent_bytes == 0;
    if (slot.done)
      answer_all(id, job, slot, kResult, 0, 0);
    else
      to_parent(id, job, slot);
  }

  void from_parent(Job &job, Slot &slot, const Header &header, int i) {
    if (!slot.summed || slot.done || slot.sequence != header.sequence) return;
    if (header.kind == kWaiting)
      return answer_all(header.job, job, slot, kWaiting, header.missing, kAbove);
    if (inbox_.payload_bytes(i) != slot.bytes) return;
    std::memcpy(slot.data.data(), inbox_.payload(i), slot.bytes);
    slot.marked = header.flags & kMarked;
    slot.done = true;
    answer_all(header.job, job, slot, kResult, 0, 0);
  }

  void to_parent(int32_t id, Job &job, Slot &slot) {
    outbox_.add({kMagic, kPiece, slot.dtype, slot.marked, id, job.parent_member, job.parent_key,
                 slot.sequence, slot.length, 0},
                slot.data.data(), slot.bytes, &job.parent, job.parent_bytes);
  }
  void answer(int32_t id, Job &job, Slot &slot, std::size_t m, Kind kind, uint64_t missing,
              uint16_t flags) {
    if (job.address_bytes[m] == 0) return;
    flags = static_cast<uint16_t>(flags | slot.marked);
    outbox_.add({kMagic, kind, slot.dtype, flags, id, static_cast<int32_t>(m), job.keys[m],
                 slot.sequence, slot.length, missing},
                slot.data.data(), kind == kResult ? slot.bytes : 0, &job.address[m],
                job.address_bytes[m]);
  }
  void answer_all(int32_t id, Job &job, Slot &slot, Kind kind, uint64_t missing, uint16_t flags) {
    for (std::size_t m = 0; m < job.keys.size(); ++m)
      answer(id, job, slot, m, kind, missing, flags);
  }

  int socket_;
  Inbox inbox_;
  Outbox outbox_;
};

int slipstream_aggregation_abi(void) { return 1; }

slipstream_aggregator *slipstream_aggregator_create(int32_t socket) {
  return new (std::nothrow) slipstream_aggregator(socket);
}

void slipstream_aggregator_free(slipstream_aggregator *self) { delete self; }

int slipstream_aggregator_add(slipstream_aggregator *self, int32_t job, int32_t members,
                              int32_t slots, int32_t payload_bytes, const uint64_t *keys,
                              const void *parent, int32_t parent_bytes, int32_t parent_member,
                              uint64_t parent_key) {
  return slipstream::guarded(nullptr, [&] {
    if (members < 1 || members > 64 || slots < 2 || payload_bytes < 8 || payload_bytes % 8 != 0 ||
        static_cast<std::size_t>(payload_bytes) > kMaxPayload ||
        static_cast<std::size_t>(parent_bytes) > sizeof(sockaddr_storage))
      return 1;
    Job made;
    made.keys.assign(keys, keys + members);
    made.address.resize(made.keys.size());
    made.address_bytes.assign(made.keys.size(), 0);
    made.slots.resize(static_cast<std::size_t>(slots));
    made.payload_bytes = static_cast<std::size_t>(payload_bytes);
    made.all = members == 64 ? ~uint64_t{0} : (uint64_t{1} << members) - 1;
    if (parent != nullptr) std::memcpy(&made.parent, parent, static_cast<std::size_t>(parent_bytes));
    made.parent_bytes = static_cast<socklen_t>(parent_bytes);
    made.parent_member = parent_member, made.parent_key = parent_key;
    const std::lock_guard<std::mutex> guard(self->lock);
    self->jobs[job] = std::move(made);
    return 0;
  });
}

int slipstream_aggregator_remove(slipstream_aggregator *self, int32_t job) {
  const std::lock_guard<std::mutex> guard(self->lock);
  return self->jobs.erase(job) == 1 ? 0 : 1;
}

int slipstream_aggregator_serve(slipstream_aggregator *self, int32_t milliseconds,
                                slipstream_mismatch *out) {
  return slipstream::guarded(nullptr, [&] { return self->serve(milliseconds, out) ? 1 : 0; });
}

int slipstream_aggregator_counts(slipstream_aggregator *self, int64_t *out) {
  const std::lock_guard<std::mutex> guard(self->lock);
  std::copy_n(self->counts, 4, out);
  return 0;
}
