"""A proxy in front of an aggregator that loses, duplicates, delays and marks datagrams."""

from __future__ import annotations

import contextlib
import heapq
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

_ECT, _CE = 2, 3  # RFC 3168


@dataclass(frozen=True)
class Faults:
    """Shares of datagrams, 0 to 1, in each direction; marks are of those to the aggregator."""

    lost: float = 0.0
    duplicated: float = 0.0
    delayed: float = 0.0
    marked: float = 0.0
    delay_s: float = 0.002


@contextlib.contextmanager
def lossy(address: str, faults: Faults, seed: int = 0) -> Iterator[str]:
    """Run a proxy in front of the aggregator at `address`; yield its own address."""
    proxy = _Proxy(address, faults, seed)
    try:
        yield proxy.address
    finally:
        proxy.close()


class _Proxy:
    def __init__(self, address: str, faults: Faults, seed: int) -> None:
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self._faults, self._random = faults, random.Random(seed)
        self._clients = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        while True:
            self._listening = socket.create_server(("127.0.0.1", 0))
            with contextlib.suppress(OSError):
                self._clients.bind(self._listening.getsockname())
                break
            self._listening.close()
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._closed = threading.Event()
        self._streams: list[socket.socket] = []
        for work in (self._accept, self._datagrams):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        for stream in (self._listening, *self._streams):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._target)
                self._streams += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=_copy, args=pair, daemon=True).start()

    def _datagrams(self) -> None:
        servers: dict[tuple[str, int], socket.socket] = {}
        clients: dict[socket.socket, tuple[str, int]] = {}
        late: list[tuple[float, int, bytes, socket.socket, tuple[str, int] | None]] = []
        number = 0
        while not self._closed.is_set():
            wait = min(0.05, max(0.0, late[0][0] - time.monotonic())) if late else 0.05
            for ready in select.select([self._clients, *clients], [], [], wait)[0]:
                try:
                    data, source = ready.recvfrom(65536)
                except OSError:
                    continue
                if ready is self._clients:
                    if source not in servers:
                        upstream = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                        upstream.connect(self._target)
                        servers[source], clients[upstream] = upstream, source
                    out, to = servers[source], None
                    marked = self._random.random() < self._faults.marked
                    out.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _CE if marked else _ECT)
                else:
                    out, to = self._clients, clients[ready]
                if self._random.random() < self._faults.lost:
                    continue
                for _ in range(1 + (self._random.random() < self._faults.duplicated)):
                    if self._random.random() < self._faults.delayed:
                        number += 1
                        due = time.monotonic() + self._random.random() * self._faults.delay_s
                        heapq.heappush(late, (due, number, data, out, to))
                    else:
                        _send(data, out, to)
            while late and late[0][0] <= time.monotonic():
                _send(*heapq.heappop(late)[2:])
        for opened in (self._clients, *clients):
            opened.close()


def _send(data: bytes, out: socket.socket, to: tuple[str, int] | None) -> None:
    with contextlib.suppress(OSError):
        if to is None:
            out.send(data)
        else:
            out.sendto(data, to)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
