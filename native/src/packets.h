// Transfers as packets: stores that forward, queues that overflow or mark, senders with windows.
//
// A transfer is cut into pieces, each of which travels as one packet: over every link of its path
// it waits for those before it, takes its bytes over the capacity, then the link's latency. What
// arrives at a queue without room is dropped; what arrives at a queue beyond its threshold is
// marked (ECN). The receiver acknowledges every packet; an acknowledgement takes the latency of the
// path back and no bandwidth. More urgent packets go first at every link.
//
// A sender has at most a window of packets under way: it doubles every round trip up to a
// threshold, then grows by one. Packets of a transfer stay in order, so that an acknowledgement
// proves that all sent before it are lost which were not acknowledged; that halves the window, at
// most once a round trip (Jacobson, SIGCOMM 1988; Cheng et al., RFC 8985). Marks shrink it by half
// of the share that was marked (Alizadeh et al., "Data center TCP", SIGCOMM 2010). Without any
// acknowledgement for a while everything counts as lost and the window begins with one again.
//
// A transfer over a tree of switches that sum has one sender for all of its hosts, whose windows are
// equal. A piece leaves over all links of hosts; a switch sends it on, towards the root, when it has
// arrived from all below, and from the root a copy returns over every link. The last copy to arrive
// is the acknowledgement, marked if any packet of the piece was (Gebara, Ghobadi, Costa, "In-network
// aggregation for shared machine learning clusters", MLSys 2021). A piece that lost a packet is sent
// again over all links.
//
// `_packets_reference.py` is the same algorithm, for reading; it gives the same bits.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "heap.h"
#include "internal.h"

namespace slipstream {

// The same interface as `Network`.
class PacketNetwork {
 public:
  PacketNetwork(const slipstream_program &program, slipstream_simulate_args &args);

  bool moves(int32_t task) const { return !flows_.empty() && flows_.bytes[task] > 0.0; }

  // The instance starts to send at the time of the next `solve`.
  void begin(int32_t instance) { arrived_.push_back(instance); }

  // Starts what came.
  void solve(double now_ns);

  // When something happens next; infinite when nothing does.
  double next_end_ns() const;

  // Everything up to `now_ns` happens. The transfers whose last byte arrived, in order.
  const std::vector<int32_t> &take_ended(double now_ns);

 private:
  enum EventKind : int32_t { kFree, kArrival, kAcknowledgement, kTimeout };
  struct Event {
    double time_ns;
    uint64_t sequence;
    int32_t kind;
    int32_t index;  // a link, a packet or a sender
    Key key() const { return static_cast<Key>(time_bits(time_ns)) << 64 | sequence; }
  };
  struct Packet {
    int32_t sender;
    int32_t piece;
    int32_t number;  // of all that its sender sent
    int32_t hop;
    int32_t next;    // in a queue
    bool marked;
    double bytes;    // with headers
  };
  struct Attempt {                // a piece on its way through a tree, by number
    std::vector<int32_t> missing; // [links to the root + 1]: arrivals before each, and at the root
    int32_t copies;               // hosts that lack the result
    bool marked = false;
  };
  struct Sent {
    int32_t number;
    int32_t piece;
  };
  struct Sender {
    int32_t instance;
    int32_t task;
    int32_t rank;
    int32_t pieces;
    int32_t fresh = 0;  // pieces from here on were never sent
    int32_t delivered = 0;
    int32_t next_number = 0;
    int32_t recovered = 0;  // losses of packets before this number have been answered
    int32_t round_end = 0;  // marks are counted up to this number
    int32_t round_acknowledged = 0;
    int32_t round_marked = 0;
    double window = 1.0;
    double threshold = 0.0;
    double marked_share = 1.0;
    double latency_ns = 0.0;  // of an acknowledgement
    double deadline_ns = 0.0;
    double patience = 1.0;
    bool timer = false;
    bool done = false;
    std::size_t first_under_way = 0;
    std::vector<Sent> under_way;  // from first_under_way on, by number
    std::size_t first_again = 0;
    std::vector<int32_t> again;   // pieces that were lost, from first_again on
    std::vector<uint8_t> state;   // [pieces]: kDelivered, kAcknowledged
    std::vector<std::vector<int32_t>> below;  // of a tree: links that lead to each, and to the root
    std::deque<Attempt> attempts;             // from number first_attempt on
    int32_t first_attempt = 0;
  };
  struct Queue {
    bool busy = false;
    double bytes = 0.0;  // that wait; without the packet being sent
  };

  void handle(const Event &event);
  void push(double time_ns, EventKind kind, int32_t index) {
    events_.push({time_ns, sequence_++, kind, index});
  }
  const int32_t *path(const Sender &sender) const {
    return flows_.link.data() + flows_.offset[sender.task];
  }
  int32_t hops(const Sender &sender) const {
    return static_cast<int32_t>(flows_.offset[sender.task + 1] - flows_.offset[sender.task]);
  }
  void start(int32_t instance, double now_ns);
  void send(int32_t sender, double now_ns);
  int32_t next_piece(Sender &sender) const;
  void emit(int32_t sender, int32_t piece, int32_t number, int32_t hop, double now_ns);
  void arrive_in_tree(int32_t packet, double now_ns);
  void arrive(int32_t packet, double now_ns);
  void enqueue(int32_t packet, int32_t link, double now_ns);
  void transmit(int32_t packet, int32_t link, double now_ns);
  void leave(int32_t link, double now_ns);
  void deliver(int32_t packet, double now_ns);
  void acknowledge(int32_t packet, double now_ns);
  void answer_losses(Sender &sender, int32_t first_lost);
  void grow(Sender &sender, const Packet &packet);
  void time_out(int32_t sender, double now_ns);
  void watch(int32_t sender, double now_ns);
  void recycle(int32_t packet) { spare_.push_back(packet); }

  const slipstream_program &program_;
  slipstream_simulate_args &args_;
  const Flows &flows_;
  const PacketModel &model_;
  std::vector<int32_t> rank_of_task_;
  int32_t ranks_ = 1;

  uint64_t sequence_ = 0;
  Heap<Event> events_;
  std::vector<int32_t> arrived_;
  std::vector<int32_t> ended_;
  std::vector<Sender> senders_;
  std::vector<Packet> packets_;
  std::vector<int32_t> spare_;
  std::vector<Queue> queues_;   // [links]
  std::vector<int32_t> first_;  // [links * ranks]: packets that wait, -1 for none
  std::vector<int32_t> last_;
};

}  // namespace slipstream
