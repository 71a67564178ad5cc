// Datagrams between members and aggregators, sent and received in batches.
#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "slipstream/aggregation.h"

namespace slipstream::aggregation {

constexpr uint32_t kMagic = 0x4c505331;
constexpr int kBatch = 64;
constexpr std::size_t kMaxPayload = 65536;

enum Kind : uint8_t { kPiece = 1, kResult = 2, kWaiting = 3 };
enum Flags : uint16_t { kMarked = 1, kAbove = 2 };

// In this machine's byte order, as the payload.
struct Header {
  uint32_t magic;
  uint8_t kind;
  uint8_t dtype;
  uint16_t flags;
  int32_t job;
  int32_t member;
  uint64_t key;
  uint64_t sequence;
  uint64_t length;   // values of the whole vector
  uint64_t missing;  // of kWaiting: members
};
static_assert(sizeof(Header) == 48, "members of all compilers agree");

inline std::size_t size_of(uint8_t dtype) { return dtype == SLIPSTREAM_SUM_FLOAT64 ? 8 : 4; }

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline bool readable(int socket, double seconds) {
  pollfd waiting{socket, POLLIN, 0};
  const int milliseconds = seconds <= 0.0 ? 0 : static_cast<int>(seconds * 1e3) + 1;
  return poll(&waiting, 1, milliseconds) > 0;
}

// A batch of received datagrams.
class Inbox {
 public:
  Inbox() : data_(kBatch * (sizeof(Header) + kMaxPayload)) {}

  int receive(int socket) {
    for (int i = 0; i < kBatch; ++i) {
      parts_[i] = {data_.data() + i * (sizeof(Header) + kMaxPayload), sizeof(Header) + kMaxPayload};
      messages_[i].msg_hdr = {&from[i], sizeof from[i], &parts_[i], 1, control_[i],
                              sizeof control_[i], 0};
    }
    return recvmmsg(socket, messages_, kBatch, MSG_DONTWAIT, nullptr);
  }
  // Whether datagram i is one of ours; copies its header.
  bool header(int i, Header *out) const {
    if (messages_[i].msg_len < sizeof(Header)) return false;
    std::memcpy(out, parts_[i].iov_base, sizeof(Header));
    return out->magic == kMagic && out->dtype <= SLIPSTREAM_SUM_INT32;
  }
  const uint8_t *payload(int i) const {
    return static_cast<const uint8_t *>(parts_[i].iov_base) + sizeof(Header);
  }
  std::size_t payload_bytes(int i) const { return messages_[i].msg_len - sizeof(Header); }
  socklen_t address_bytes(int i) const { return messages_[i].msg_hdr.msg_namelen; }
  // Whether a queue on the way was too long: explicit congestion notification, RFC 3168.
  bool congested(int i) {
    msghdr &message = messages_[i].msg_hdr;
    for (cmsghdr *c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c))
      if ((c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_TOS) ||
          (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_TCLASS))
        return (*CMSG_DATA(c) & 3) == 3;
    return false;
  }

  sockaddr_storage from[kBatch];

 private:
  std::vector<uint8_t> data_;
  mmsghdr messages_[kBatch];
  iovec parts_[kBatch];
  alignas(cmsghdr) char control_[kBatch][64];
};

// Datagrams to be sent; payloads are referenced, not copied.
class Outbox {
 public:
  void add(const Header &header, const void *payload, std::size_t bytes,
           const sockaddr_storage *to = nullptr, socklen_t to_bytes = 0) {
    headers_.push_back(header);
    rest_.push_back({payload, bytes, to, to_bytes});
  }
  bool empty() const { return headers_.empty(); }

  // Sends all. Datagrams that the socket refuses for now are lost, and repeated later by members.
  // Returns 0, or the first other error.
  int flush(int socket) {
    const std::size_t count = headers_.size();
    std::vector<iovec> parts(2 * count);
    std::vector<mmsghdr> messages(count);
    for (std::size_t i = 0; i < count; ++i) {
      parts[2 * i] = {&headers_[i], sizeof(Header)};
      parts[2 * i + 1] = {const_cast<void *>(rest_[i].payload), rest_[i].bytes};
      messages[i] = {};
      messages[i].msg_hdr.msg_name = const_cast<sockaddr_storage *>(rest_[i].to);
      messages[i].msg_hdr.msg_namelen = rest_[i].to_bytes;
      messages[i].msg_hdr.msg_iov = &parts[2 * i];
      messages[i].msg_hdr.msg_iovlen = rest_[i].bytes == 0 ? 1 : 2;
    }
    int error = 0;
    for (std::size_t done = 0; done < count;) {
      const int sent = sendmmsg(socket, &messages[done], static_cast<unsigned>(count - done), 0);
      if (sent > 0) {
        done += static_cast<std::size_t>(sent);
        continue;
      }
      const bool passing = errno == EAGAIN || errno == ENOBUFS || errno == ECONNREFUSED ||
                           errno == EHOSTUNREACH || errno == ENETUNREACH || errno == ENETDOWN;
      if (errno != EINTR) ++done;
      if (errno != EINTR && !passing && error == 0) error = errno;
    }
    headers_.clear();
    rest_.clear();
    return error;
  }

 private:
  struct Rest {
    const void *payload;
    std::size_t bytes;
    const sockaddr_storage *to;
    socklen_t to_bytes;
  };
  std::vector<Header> headers_;
  std::vector<Rest> rest_;
};

}  // namespace slipstream::aggregation
