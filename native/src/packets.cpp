// See packets.h.

#include "packets.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ranks.h"

namespace slipstream {
namespace {

constexpr uint8_t kDelivered = 1;
constexpr uint8_t kAcknowledged = 2;
// Of the share of marked packets, what a new round counts.
constexpr double kGain = 1.0 / 16.0;
constexpr double kMostPatience = 64.0;

}  // namespace

PacketNetwork::PacketNetwork(const slipstream_program &program, slipstream_simulate_args &args)
    : program_(program), args_(args), flows_(program.flows), model_(program.packets) {
  args_.out_changes = 0;
  if (flows_.empty()) return;
  ranks_ = rank_by_priority(program, rank_of_task_);
  queues_.resize(flows_.capacity.size());
  first_.assign(queues_.size() * static_cast<std::size_t>(ranks_), -1);
  last_ = first_;
}

double PacketNetwork::next_end_ns() const {
  return events_.empty() ? std::numeric_limits<double>::infinity() : events_.top().time_ns;
}

void PacketNetwork::solve(double now_ns) {
  std::sort(arrived_.begin(), arrived_.end());
  for (const int32_t instance : arrived_) start(instance, now_ns);
  arrived_.clear();
}

const std::vector<int32_t> &PacketNetwork::take_ended(double now_ns) {
  ended_.clear();
  while (next_end_ns() <= now_ns) {
    const Event event = events_.top();
    events_.pop();
    handle(event);
  }
  std::sort(ended_.begin(), ended_.end());
  return ended_;
}

void PacketNetwork::handle(const Event &event) {
  switch (event.kind) {
    case kFree: return leave(event.index, event.time_ns);
    case kArrival: return arrive(event.index, event.time_ns);
    case kAcknowledgement: return acknowledge(event.index, event.time_ns);
    default: return time_out(event.index, event.time_ns);
  }
}

// ---- senders --------------------------------------------------------------------------------

void PacketNetwork::start(int32_t instance, double now_ns) {
  const int32_t id = static_cast<int32_t>(senders_.size());
  senders_.emplace_back();
  Sender &sender = senders_.back();
  sender.instance = instance;
  sender.task = instance < program_.tasks ? instance : instance % program_.tasks;
  sender.rank = rank_of_task_.empty() ? 0 : rank_of_task_[sender.task];
  sender.pieces =
      static_cast<int32_t>(std::ceil(flows_.bytes[sender.task] / model_.payload_bytes));
  sender.window = std::min(model_.first_window, model_.max_window);
  sender.threshold = model_.max_window;
  if (flows_.tree(sender.task)) {
    const int32_t *parent = flows_.parent.data() + flows_.offset[sender.task];
    const int32_t up = hops(sender) / 2;
    sender.below.resize(static_cast<std::size_t>(up) + 1);
    for (int32_t hop = 0; hop < up; ++hop)
      sender.below[parent[hop] < 0 ? up : parent[hop]].push_back(hop);
  } else {
    for (int32_t hop = 0; hop < hops(sender); ++hop)
      sender.latency_ns += model_.latency_ns[path(sender)[hop]];
  }
  sender.state.assign(static_cast<std::size_t>(sender.pieces), 0);
  send(id, now_ns);
}

// As many packets as the window lets.
void PacketNetwork::send(int32_t id, double now_ns) {
  for (;;) {
    Sender &sender = senders_[id];
    const std::size_t under_way = sender.under_way.size() - sender.first_under_way;
    if (static_cast<double>(under_way) + 1.0 > sender.window) return;
    const int32_t piece = next_piece(sender);
    if (piece < 0) return;
    if (under_way == 0) watch(id, now_ns);
    const int32_t number = sender.next_number++;
    sender.under_way.push_back({number, piece});
    if (sender.below.empty()) {
      emit(id, piece, number, 0, now_ns);
      continue;
    }
    const int32_t oldest = sender.under_way[sender.first_under_way].number;
    for (; !sender.attempts.empty() && sender.first_attempt < oldest; ++sender.first_attempt)
      sender.attempts.pop_front();
    if (sender.attempts.empty()) sender.first_attempt = number;
    sender.attempts.emplace_back();
    Attempt &attempt = sender.attempts.back();
    for (const auto &below : sender.below)
      attempt.missing.push_back(static_cast<int32_t>(below.size()));
    attempt.copies = static_cast<int32_t>(
        std::count(attempt.missing.begin(), attempt.missing.end(), 0));
    const int32_t up = hops(sender) / 2;
    for (int32_t hop = 0; hop < up; ++hop)
      if (sender.below[hop].empty()) emit(id, piece, number, hop, now_ns);
  }
}

void PacketNetwork::emit(int32_t id, int32_t piece, int32_t number, int32_t hop, double now_ns) {
  int32_t packet;
  if (spare_.empty()) {
    packet = static_cast<int32_t>(packets_.size());
    packets_.emplace_back();
  } else {
    packet = spare_.back();
    spare_.pop_back();
  }
  const Sender &sender = senders_[id];
  double payload = model_.payload_bytes;
  if (piece == sender.pieces - 1)
    payload = flows_.bytes[sender.task] - model_.payload_bytes * (sender.pieces - 1);
  packets_[packet] = {id, piece, number, hop, -1, false, payload + model_.header_bytes};
  enqueue(packet, path(sender)[hop], now_ns);
}

// What was lost goes first.
int32_t PacketNetwork::next_piece(Sender &sender) const {
  while (sender.first_again < sender.again.size()) {
    const int32_t piece = sender.again[sender.first_again++];
    if (sender.state[piece] & kAcknowledged) continue;
    if (args_.out_sent_again != nullptr) ++args_.out_sent_again[sender.instance];
    return piece;
  }
  sender.again.clear();
  sender.first_again = 0;
  return sender.fresh < sender.pieces ? sender.fresh++ : -1;
}

void PacketNetwork::acknowledge(int32_t id, double now_ns) {
  const Packet packet = packets_[id];
  recycle(id);
  Sender &sender = senders_[packet.sender];
  if (sender.done) return;
  sender.state[packet.piece] |= kAcknowledged;
  // One that was given up for lost.
  if (sender.first_under_way == sender.under_way.size() ||
      packet.number < sender.under_way[sender.first_under_way].number)
    return;
  int32_t first_lost = -1;
  for (; sender.under_way[sender.first_under_way].number < packet.number;
       ++sender.first_under_way) {
    const Sent &lost = sender.under_way[sender.first_under_way];
    if (first_lost < 0) first_lost = lost.number;
    sender.again.push_back(lost.piece);
  }
  if (++sender.first_under_way == sender.under_way.size()) {
    sender.under_way.clear();
    sender.first_under_way = 0;
  }
  sender.deadline_ns = now_ns + model_.timeout_ns;
  sender.patience = 1.0;
  if (first_lost >= 0)
    answer_losses(sender, first_lost);
  else
    grow(sender, packet);
  send(packet.sender, now_ns);
}

void PacketNetwork::answer_losses(Sender &sender, int32_t first_lost) {
  if (first_lost < sender.recovered) return;
  sender.window = sender.threshold = std::max(1.0, sender.window * 0.5);
  sender.recovered = sender.next_number;
}

void PacketNetwork::grow(Sender &sender, const Packet &packet) {
  if (packet.marked && sender.window < sender.threshold) sender.threshold = sender.window;
  sender.window += sender.window < sender.threshold ? 1.0 : 1.0 / sender.window;
  sender.window = std::min(sender.window, model_.max_window);
  ++sender.round_acknowledged;
  if (packet.marked) ++sender.round_marked;
  if (packet.number < sender.round_end) return;
  const double share = static_cast<double>(sender.round_marked) / sender.round_acknowledged;
  sender.marked_share += (share - sender.marked_share) * kGain;
  if (sender.round_marked > 0) {
    sender.window = std::max(1.0, sender.window * (1.0 - 0.5 * sender.marked_share));
    sender.threshold = sender.window;
  }
  sender.round_acknowledged = sender.round_marked = 0;
  sender.round_end = sender.next_number;
}

void PacketNetwork::watch(int32_t id, double now_ns) {
  Sender &sender = senders_[id];
  sender.deadline_ns = now_ns + model_.timeout_ns * sender.patience;
  if (sender.timer) return;
  sender.timer = true;
  push(sender.deadline_ns, kTimeout, id);
}

void PacketNetwork::time_out(int32_t id, double now_ns) {
  Sender &sender = senders_[id];
  sender.timer = false;
  if (sender.done || sender.under_way.empty()) return;
  if (sender.deadline_ns > now_ns) {
    sender.timer = true;
    push(sender.deadline_ns, kTimeout, id);
    return;
  }
  for (; sender.first_under_way < sender.under_way.size(); ++sender.first_under_way)
    sender.again.push_back(sender.under_way[sender.first_under_way].piece);
  sender.under_way.clear();
  sender.first_under_way = 0;
  sender.threshold = std::max(1.0, sender.window * 0.5);
  sender.window = 1.0;
  sender.patience = std::min(kMostPatience, 2.0 * sender.patience);
  sender.recovered = sender.round_end = sender.next_number;
  sender.round_acknowledged = sender.round_marked = 0;
  send(id, now_ns);
}

// ---- links ----------------------------------------------------------------------------------

void PacketNetwork::arrive_in_tree(int32_t id, double now_ns) {
  const Packet packet = packets_[id];
  Sender &sender = senders_[packet.sender];
  const std::size_t place = static_cast<std::size_t>(packet.number - sender.first_attempt);
  if (packet.number < sender.first_attempt || place >= sender.attempts.size()) return recycle(id);
  Attempt &attempt = sender.attempts[place];
  attempt.marked = attempt.marked || packet.marked;
  const int32_t up = hops(sender) / 2, hop = packet.hop - 1;
  const auto emit_below = [&](int32_t link) {
    for (const int32_t next : sender.below[link])
      emit(packet.sender, packet.piece, packet.number, up + next, now_ns);
  };
  if (hop >= up) {
    if (sender.below[hop - up].empty() && --attempt.copies == 0) {
      packets_[id].marked = attempt.marked;
      return deliver(id, now_ns);
    }
    emit_below(hop - up);
    return recycle(id);
  }
  const int32_t parent = flows_.parent[flows_.offset[sender.task] + hop];
  if (--attempt.missing[parent < 0 ? up : parent] == 0) {
    if (parent < 0)
      emit_below(up);
    else
      emit(packet.sender, packet.piece, packet.number, parent, now_ns);
  }
  recycle(id);
}

void PacketNetwork::arrive(int32_t id, double now_ns) {
  const Packet &packet = packets_[id];
  const Sender &sender = senders_[packet.sender];
  if (!sender.below.empty()) return arrive_in_tree(id, now_ns);
  if (packet.hop == hops(sender))
    deliver(id, now_ns);
  else
    enqueue(id, path(sender)[packet.hop], now_ns);
}

void PacketNetwork::enqueue(int32_t id, int32_t link, double now_ns) {
  Queue &queue = queues_[link];
  if (!queue.busy) return transmit(id, link, now_ns);
  Packet &packet = packets_[id];
  const double bytes = queue.bytes + packet.bytes;
  if (bytes > model_.queue_bytes[link]) {
    if (args_.out_dropped != nullptr) ++args_.out_dropped[link];
    recycle(id);
    return;
  }
  if (bytes > model_.mark_bytes[link]) {
    packet.marked = true;
    if (args_.out_marked != nullptr) ++args_.out_marked[link];
  }
  queue.bytes = bytes;
  if (args_.out_queue_peak != nullptr)
    args_.out_queue_peak[link] = std::max(args_.out_queue_peak[link], bytes);
  const std::size_t line = static_cast<std::size_t>(link) * ranks_ + senders_[packet.sender].rank;
  packet.next = -1;
  (first_[line] < 0 ? first_[line] : packets_[last_[line]].next) = id;
  last_[line] = id;
}

void PacketNetwork::transmit(int32_t id, int32_t link, double now_ns) {
  queues_[link].busy = true;
  Packet &packet = packets_[id];
  ++packet.hop;
  const double sent_ns = now_ns + packet.bytes / flows_.capacity[link];
  push(sent_ns, kFree, link);
  push(sent_ns + model_.latency_ns[link], kArrival, id);
}

// A packet has left; the first of the most urgent waiting ones is next.
void PacketNetwork::leave(int32_t link, double now_ns) {
  Queue &queue = queues_[link];
  queue.busy = false;
  const std::size_t lines = static_cast<std::size_t>(link) * ranks_;
  for (std::size_t line = lines; line < lines + ranks_; ++line) {
    const int32_t id = first_[line];
    if (id < 0) continue;
    first_[line] = packets_[id].next;
    queue.bytes -= packets_[id].bytes;
    return transmit(id, link, now_ns);
  }
  queue.bytes = 0.0;
}

void PacketNetwork::deliver(int32_t id, double now_ns) {
  const Packet &packet = packets_[id];
  Sender &sender = senders_[packet.sender];
  if (sender.done) return recycle(id);
  uint8_t &state = sender.state[packet.piece];
  if (!(state & kDelivered)) {
    state |= kDelivered;
    if (++sender.delivered == sender.pieces) {
      ended_.push_back(sender.instance);
      sender.done = true;
      std::vector<uint8_t>().swap(sender.state);
      std::vector<Sent>().swap(sender.under_way);
      std::vector<int32_t>().swap(sender.again);
      return recycle(id);
    }
  }
  push(now_ns + sender.latency_ns, kAcknowledgement, id);
}

}  // namespace slipstream
