"""Transfers as packets: a readable form of `native/src/packets.cpp`.

``native/src/packets.h`` describes the algorithm and its sources. The results of both are bitwise
equal.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.native._network_reference import Transfers
from slipstream.native.inputs import Flows, Packets
from slipstream.native.results import QueueCounts

if TYPE_CHECKING:
    from slipstream.native.program import Program

# As in packets.cpp.
_GAIN = 1.0 / 16.0
_MAX_PATIENCE = 64.0


@dataclass(eq=False)
class _Attempt:
    """A piece on its way through a tree."""

    missing: list[int]  # arrivals before each link towards the root, and at the root
    copies: int  # hosts that lack the result
    marked: bool = False


@dataclass(eq=False)
class _Sender:
    instance: int
    path: list[int]
    rank: int
    pieces: int
    last_payload: float
    window: float
    threshold: float
    latency_ns: float = 0.0  # of an acknowledgement
    fresh: int = 0  # pieces from this one have never been sent
    next_number: int = 0
    recovered: int = 0  # losses of packets before this number have been handled
    round_end: int = 0  # marks are counted up to this number
    round_acknowledged: int = 0
    round_marked: int = 0
    marked_share: float = 1.0
    deadline_ns: float = 0.0
    patience: float = 1.0
    timer: bool = False
    under_way: deque[tuple[int, int]] = field(default_factory=deque)  # (number, piece)
    again: deque[int] = field(default_factory=deque)
    delivered: set[int] = field(default_factory=set)
    # Of a tree: by link towards the root, and for the root, the links that lead to it.
    below: list[list[int]] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    attempts: dict[int, _Attempt] = field(default_factory=dict)
    acknowledged: set[int] = field(default_factory=set)

    def done(self) -> bool:
        return len(self.delivered) == self.pieces


@dataclass(eq=False)
class _Packet:
    sender: _Sender
    piece: int
    number: int  # among all packets of its sender
    nbytes: float  # with headers
    hop: int = 0
    marked: bool = False


@dataclass(eq=False)
class _Queue:
    lines: list[deque[_Packet]]  # by priority
    busy: bool = False
    nbytes: float = 0.0  # of waiting packets, without the one being sent


class PacketNetwork(Transfers):
    """The transfers of one simulation; the same interface as `Network`."""

    def __init__(self, program: Program, flows: Flows, packets: Packets) -> None:
        super().__init__(program, flows)
        self.packets, self.flows = packets, flows
        self.latency_ns = packets.latency_ns.tolist()
        self.room = packets.queue_bytes.tolist()
        self.marks_beyond = packets.mark_bytes.tolist()
        self.queues = [_Queue([deque() for _ in range(self.ranks)]) for _ in self.capacity]
        self.counts = QueueCounts.zeros(len(self.capacity), program.steps * program.tasks)
        self.sequence = itertools.count()
        self.events: list[tuple[float, int, str, int | _Packet | _Sender]] = []
        self.ended: list[int] = []

    def solve(self, now_ns: float) -> None:
        """Start the transfers that have arrived."""
        for instance in sorted(self.arrived):
            self._start(instance, now_ns)
        self.arrived.clear()

    def next_end_ns(self) -> float:
        """Return the time of the next event; infinite if there is none."""
        return self.events[0][0] if self.events else math.inf

    def take_ended(self, now_ns: float) -> list[int]:
        """Process all events up to `now_ns`; return the instances whose last byte arrived."""
        self.ended = []
        while self.next_end_ns() <= now_ns:
            time_ns, _, kind, what = heapq.heappop(self.events)
            if isinstance(what, int):
                self._leave(what, time_ns)
            elif isinstance(what, _Sender):
                self._time_out(what, time_ns)
            elif kind == "arrival":
                self._arrive(what, time_ns)
            else:
                self._acknowledge(what, time_ns)
        return sorted(self.ended)

    def _push(self, time_ns: float, kind: str, what: int | _Packet | _Sender) -> None:
        heapq.heappush(self.events, (time_ns, next(self.sequence), kind, what))

    # ---- senders -----------------------------------------------------------------------------

    def _start(self, instance: int, now_ns: float) -> None:
        task, model = instance % self.tasks, self.packets
        pieces = math.ceil(self.nbytes[task] / model.payload_bytes)
        sender = _Sender(
            instance, self.path[task], self.rank[task], pieces,
            self.nbytes[task] - model.payload_bytes * (pieces - 1),
            min(float(model.first_window), float(model.max_window)), float(model.max_window),
        )  # fmt: skip
        if self.flows.is_tree(task):
            up = len(sender.path) // 2
            first = int(self.flows.path_offset[task])
            sender.parent = self.flows.tree_parent[first : first + up].tolist()
            sender.below = [[] for _ in range(up + 1)]
            for hop, parent in enumerate(sender.parent):
                sender.below[up if parent < 0 else parent].append(hop)
        else:
            for link in sender.path:
                sender.latency_ns += self.latency_ns[link]
        self._send(sender, now_ns)

    def _send(self, sender: _Sender, now_ns: float) -> None:
        """Send as many packets as the window allows."""
        while len(sender.under_way) + 1.0 <= sender.window:
            piece = self._next_piece(sender)
            if piece is None:
                return
            if not sender.under_way:
                self._watch(sender, now_ns)
            number = sender.next_number
            sender.under_way.append((number, piece))
            sender.next_number += 1
            if not sender.below:
                self._emit(sender, piece, number, 0, now_ns)
                continue
            oldest = sender.under_way[0][0]
            sender.attempts = {n: a for n, a in sender.attempts.items() if n >= oldest}
            missing = [len(below) for below in sender.below]
            sender.attempts[number] = _Attempt(missing, missing.count(0))
            for hop in range(len(sender.parent)):
                if not sender.below[hop]:
                    self._emit(sender, piece, number, hop, now_ns)

    def _emit(self, sender: _Sender, piece: int, number: int, hop: int, now_ns: float) -> None:
        last = piece == sender.pieces - 1
        payload = sender.last_payload if last else self.packets.payload_bytes
        packet = _Packet(sender, piece, number, payload + self.packets.header_bytes, hop)
        self._enqueue(packet, sender.path[hop], now_ns)

    def _next_piece(self, sender: _Sender) -> int | None:
        """Return the next piece to send, lost ones first, or None."""
        while sender.again:
            piece = sender.again.popleft()
            if piece not in sender.acknowledged:
                self.counts.sent_again[sender.instance] += 1
                return piece
        if sender.fresh == sender.pieces:
            return None
        sender.fresh += 1
        return sender.fresh - 1

    def _acknowledge(self, packet: _Packet, now_ns: float) -> None:
        sender = packet.sender
        if sender.done():
            return
        sender.acknowledged.add(packet.piece)
        if not sender.under_way or packet.number < sender.under_way[0][0]:
            return  # a packet that was considered lost
        first_lost = None
        while sender.under_way[0][0] < packet.number:
            number, piece = sender.under_way.popleft()
            first_lost = number if first_lost is None else first_lost
            sender.again.append(piece)
        sender.under_way.popleft()
        sender.deadline_ns = now_ns + self.packets.timeout_ns
        sender.patience = 1.0
        if first_lost is None:
            self._grow(sender, packet)
        elif first_lost >= sender.recovered:
            sender.window = sender.threshold = max(1.0, sender.window * 0.5)
            sender.recovered = sender.next_number
        self._send(sender, now_ns)

    def _grow(self, sender: _Sender, packet: _Packet) -> None:
        if packet.marked and sender.window < sender.threshold:
            sender.threshold = sender.window
        sender.window += 1.0 if sender.window < sender.threshold else 1.0 / sender.window
        sender.window = min(sender.window, float(self.packets.max_window))
        sender.round_acknowledged += 1
        sender.round_marked += packet.marked
        if packet.number < sender.round_end:
            return
        share = sender.round_marked / sender.round_acknowledged
        sender.marked_share += (share - sender.marked_share) * _GAIN
        if sender.round_marked > 0:
            sender.window = max(1.0, sender.window * (1.0 - 0.5 * sender.marked_share))
            sender.threshold = sender.window
        sender.round_acknowledged = sender.round_marked = 0
        sender.round_end = sender.next_number

    def _watch(self, sender: _Sender, now_ns: float) -> None:
        sender.deadline_ns = now_ns + self.packets.timeout_ns * sender.patience
        if not sender.timer:
            sender.timer = True
            self._push(sender.deadline_ns, "timeout", sender)

    def _time_out(self, sender: _Sender, now_ns: float) -> None:
        sender.timer = False
        if sender.done() or not sender.under_way:
            return
        if sender.deadline_ns > now_ns:
            sender.timer = True
            self._push(sender.deadline_ns, "timeout", sender)
            return
        sender.again.extend(piece for _, piece in sender.under_way)
        sender.under_way.clear()
        sender.threshold = max(1.0, sender.window * 0.5)
        sender.window = 1.0
        sender.patience = min(_MAX_PATIENCE, 2.0 * sender.patience)
        sender.recovered = sender.round_end = sender.next_number
        sender.round_acknowledged = sender.round_marked = 0
        self._send(sender, now_ns)

    # ---- links -------------------------------------------------------------------------------

    def _arrive_in_tree(self, packet: _Packet, now_ns: float) -> bool:
        """Send a piece on; return whether this was the last copy of its sum."""
        sender = packet.sender
        attempt = sender.attempts.get(packet.number)
        if attempt is None:
            return False
        attempt.marked |= packet.marked
        up, hop = len(sender.parent), packet.hop - 1
        then: list[int] = []
        if hop >= up:
            below = sender.below[hop - up]
            if not below:
                attempt.copies -= 1
                packet.marked = attempt.marked
                return attempt.copies == 0
            then = [up + link for link in below]
        else:
            parent = sender.parent[hop]
            attempt.missing[parent] -= 1  # -1 is the root's, the last
            if attempt.missing[parent] == 0:
                then = [parent] if parent >= 0 else [up + link for link in sender.below[up]]
        for link in then:
            self._emit(sender, packet.piece, packet.number, link, now_ns)
        return False

    def _arrive(self, packet: _Packet, now_ns: float) -> None:
        if packet.sender.below:
            if not self._arrive_in_tree(packet, now_ns):
                return
        elif packet.hop < len(packet.sender.path):
            self._enqueue(packet, packet.sender.path[packet.hop], now_ns)
            return
        sender = packet.sender
        if sender.done():
            return
        sender.delivered.add(packet.piece)
        if sender.done():
            self.ended.append(sender.instance)
        else:
            self._push(now_ns + sender.latency_ns, "acknowledgement", packet)

    def _enqueue(self, packet: _Packet, link: int, now_ns: float) -> None:
        queue = self.queues[link]
        if not queue.busy:
            self._transmit(packet, link, now_ns)
            return
        nbytes = queue.nbytes + packet.nbytes
        if nbytes > self.room[link]:
            self.counts.dropped[link] += 1
            return
        if nbytes > self.marks_beyond[link]:
            packet.marked = True
            self.counts.marked[link] += 1
        queue.nbytes = nbytes
        self.counts.peak_bytes[link] = max(self.counts.peak_bytes[link], nbytes)
        queue.lines[packet.sender.rank].append(packet)

    def _transmit(self, packet: _Packet, link: int, now_ns: float) -> None:
        self.queues[link].busy = True
        packet.hop += 1
        sent_ns = now_ns + packet.nbytes / self.capacity[link]
        self._push(sent_ns, "free", link)
        self._push(sent_ns + self.latency_ns[link], "arrival", packet)

    def _leave(self, link: int, now_ns: float) -> None:
        """Transmit the first of the most urgent waiting packets after one has left."""
        queue = self.queues[link]
        queue.busy = False
        for line in queue.lines:
            if line:
                packet = line.popleft()
                queue.nbytes -= packet.nbytes
                self._transmit(packet, link, now_ns)
                return
        queue.nbytes = 0.0
