// The side that sends vectors and receives their sums. See aggregation.h.
//
// The window follows the marks of the results in the order of pieces. Every member sees the same
// marks, because an aggregator adds those of all members to the result; so windows are equal on all
// members. A repeated piece is marked too: what one member lost slows down all of them.

#include <algorithm>
#include <atomic>
#include <cmath>

#include "aggregation/datagram.h"
#include "internal.h"

namespace slipstream::aggregation {
namespace {

constexpr double kGain = 1.0 / 16.0;  // of a window's share of marks
constexpr double kFirstWindow = 8.0;
constexpr double kMinTimeout_s = 0.02, kMaxTimeout_s = 0.2;
constexpr double kTick_s = 0.02;  // between looks at `abort`
// Later pieces that are answered before a piece counts as lost.
constexpr uint64_t kReordered = 3;
constexpr std::size_t kRepeatedTogether = 4;

struct Piece {
  double sent_s = 0.0;
  uint64_t order = 0;  // of its latest datagram among all
  bool again = false, done = false, marked = false;
};

}  // namespace
}  // namespace slipstream::aggregation

using namespace slipstream::aggregation;

struct slipstream_member {
  slipstream_member(int to, int32_t of_job, int32_t member, uint64_t secret, int32_t slots,
                    int32_t bytes)
      : socket(to), job(of_job), number(member), key(secret), max_window(slots / 2),
        payload_bytes(static_cast<std::size_t>(bytes)) {}

  int socket;
  int32_t job, number;
  uint64_t key;
  double max_window;
  std::size_t payload_bytes;

  std::atomic<bool> aborted{false};
  uint64_t sequence = 0;  // of the next vector's first piece
  uint64_t order = 0;
  double window = kFirstWindow, share = 1.0, smooth_s = 0.0, deviation_s = 0.0;
  uint64_t round_end = 0, windows = 14695981039346656037u;
  int64_t round_pieces = 0, round_marked = 0;
  bool slow_start = true;
  Inbox inbox;
  Outbox outbox;

  // Results of all pieces before this one have arrived.
  void advance(uint64_t piece, bool marked) {
    ++round_pieces;
    if (marked) ++round_marked, slow_start = false;
    window += slow_start ? 1.0 : 1.0 / window;
    if (piece >= round_end) {
      share += (static_cast<double>(round_marked) / round_pieces - share) * kGain;
      if (round_marked > 0) window *= 1.0 - 0.5 * share;
      round_pieces = round_marked = 0;
      round_end = piece + static_cast<uint64_t>(window);
    }
    window = std::min(std::max(window, 1.0), max_window);
    uint64_t bits;
    std::memcpy(&bits, &window, sizeof bits);
    windows = (windows ^ bits) * 1099511628211u;
  }

  void measure(double trip_s) {
    if (smooth_s == 0.0) smooth_s = trip_s, deviation_s = 0.5 * trip_s;
    deviation_s += (std::fabs(trip_s - smooth_s) - deviation_s) * 0.25;
    smooth_s += (trip_s - smooth_s) * 0.125;
  }

  int sum(uint8_t dtype, const uint8_t *input, uint8_t *output, int64_t values, double silent_s,
          double timeout_s, slipstream_sum_report *report) {
    const std::size_t bytes = static_cast<std::size_t>(values) * size_of(dtype);
    const std::size_t count = (bytes + payload_bytes - 1) / payload_bytes;
    std::vector<Piece> pieces(count);
    std::size_t base = 0, fresh = 0;
    const uint64_t begin = sequence;
    double heard_s = now_s(), moved_s = heard_s, patience = 1.0;
    const auto size = [&](std::size_t p) { return std::min(payload_bytes, bytes - p * payload_bytes); };
    const auto send = [&](std::size_t p, double now) {
      Piece &piece = pieces[p];
      ++report->sent;
      if (piece.order != 0) piece.again = true, ++report->repeated;
      piece.sent_s = now, piece.order = ++order;
      outbox.add({kMagic, kPiece, dtype, static_cast<uint16_t>(piece.again ? kMarked : 0), job, number, key,
                  begin + p, static_cast<uint64_t>(values), 0},
                 input + p * payload_bytes, size(p));
    };
    while (base < count) {
      if (aborted.load()) return SLIPSTREAM_SUM_ABORTED;
      double now = now_s();
      while (fresh < count && static_cast<double>(fresh - base) + 1.0 <= window) send(fresh++, now);
      const double wait_s = std::min(
          patience * std::max(smooth_s + 4.0 * deviation_s, kMinTimeout_s), kMaxTimeout_s);
      if (now - std::max(moved_s, pieces[base].sent_s) > wait_s) {
        std::size_t repeated = 0;
        for (std::size_t p = base; p < fresh && repeated < kRepeatedTogether; ++p)
          if (!pieces[p].done) send(p, now), ++repeated;
        patience = std::min(2.0 * patience, kMaxTimeout_s / kMinTimeout_s);
      }
      if (now - heard_s > silent_s) return SLIPSTREAM_SUM_SILENT;
      if (now - moved_s > timeout_s) return SLIPSTREAM_SUM_WAITING;
      if (const int error = outbox.flush(socket); error != 0) {
        report->detail = error;
        return error == EMSGSIZE ? SLIPSTREAM_SUM_TOO_LARGE : SLIPSTREAM_SUM_ERROR;
      }
      if (!readable(socket, std::min(wait_s, kTick_s))) continue;
      const int received = inbox.receive(socket);
      now = now_s();
      uint64_t latest = 0;
      for (int i = 0; i < received; ++i) {
        Header header;
        if (!inbox.header(i, &header) || header.key != key || header.member != number ||
            header.job != job)
          continue;
        heard_s = now;
        const uint64_t p = header.sequence - begin;
        if (p >= count || pieces[p].done) continue;
        if (header.kind == kWaiting) {
          if (p != base) continue;
          report->missing = header.missing;
          report->above = (header.flags & kAbove) != 0;
        } else if (header.kind == kResult && inbox.payload_bytes(i) == size(p)) {
          std::memcpy(output + p * payload_bytes, inbox.payload(i), size(p));
          pieces[p].done = true;
          pieces[p].marked = (header.flags & kMarked) != 0;
          if (!pieces[p].again) measure(now - pieces[p].sent_s);
          latest = std::max(latest, pieces[p].order);
          moved_s = now, patience = 1.0;
        }
      }
      for (; base < count && pieces[base].done; ++base) advance(begin + base, pieces[base].marked);
      for (std::size_t p = base; p < fresh; ++p)
        if (!pieces[p].done && pieces[p].order + kReordered < latest) send(p, now);
    }
    sequence = begin + count;
    return SLIPSTREAM_SUM_DONE;
  }
};

slipstream_member *slipstream_member_create(int32_t socket, int32_t job, int32_t member,
                                            uint64_t key, int32_t slots, int32_t payload_bytes) {
  if (slots < 2 || payload_bytes < 8 || static_cast<std::size_t>(payload_bytes) > kMaxPayload)
    return nullptr;
  return new (std::nothrow) slipstream_member(socket, job, member, key, slots, payload_bytes);
}

void slipstream_member_free(slipstream_member *self) { delete self; }

int slipstream_member_abort(slipstream_member *self) {
  self->aborted.store(true);
  return 0;
}

int slipstream_member_sum(slipstream_member *self, int32_t dtype, const void *input, void *output,
                          int64_t values, double silent_s, double timeout_s,
                          slipstream_sum_report *out) {
  return slipstream::guarded(nullptr, [&] {
    *out = {};
    const int status =
        self->sum(static_cast<uint8_t>(dtype), static_cast<const uint8_t *>(input),
                  static_cast<uint8_t *>(output), values, silent_s, timeout_s, out);
    out->window = self->window, out->windows = self->windows;
    return status;
  });
}
