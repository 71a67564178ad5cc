"""Bytes on the wire: what a network interface sent and received over time, including headers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from slipstream.errors import UnknownNameError

# Counters of the thread's network namespace; /sys/class/net shows that of its mount.
_COUNTERS = Path("/proc/thread-self/net/dev")
_MAX_DELAY_S = 0.001


class Interface:
    """Bytes that a network interface sent and received since this object was created.

    Raises:
        UnknownNameError: This machine has no such interface.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._received, self._sent = self._read()

    @property
    def sent_bytes(self) -> int:
        """Bytes sent, including headers."""
        return self._read()[1] - self._sent

    @property
    def received_bytes(self) -> int:
        """Bytes received, including headers."""
        return self._read()[0] - self._received

    def _read(self) -> tuple[int, int]:
        """Return the bytes received and sent since the interface was created."""
        try:
            lines = _COUNTERS.read_text().splitlines()[2:]
        except OSError:
            lines = []
        rows = dict(line.split(":", 1) for line in lines)
        counters = {name.strip(): row.split() for name, row in rows.items()}
        if self.name not in counters:
            raise UnknownNameError("network interface", self.name, counters)
        return int(counters[self.name][0]), int(counters[self.name][8])


@dataclass
class Samples:
    """Traffic of an interface over time.

    Attributes:
        times_s: Times by `time.perf_counter`, ascending.
        sent, received: Bytes since the first time, including headers.
    """

    times_s: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)


@contextmanager
def sampled(interface: Interface, every_s: float) -> Iterator[Samples]:
    """Sample the counters at the start and end of the body, and in between from a thread.

    A reading takes about 50 microseconds of CPU time.

    Args:
        every_s: Interval between readings; longer if no core is free.
    """
    samples, ended = Samples(), threading.Event()

    def read(*, always: bool = False) -> None:
        before = time.perf_counter()
        received, sent = interface._read()
        after = time.perf_counter()
        # After a delay between the two clock reads, the time of the counters is unknown.
        if always or after - before < _MAX_DELAY_S:
            samples.times_s.append((before + after) / 2)
            samples.sent.append(sent)
            samples.received.append(received)

    def run() -> None:
        while not ended.wait(every_s):
            read()

    read(always=True)
    thread = threading.Thread(target=run, daemon=True, name="slipstream-interface")
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
        read(always=True)
        samples.sent = [n - samples.sent[0] for n in samples.sent]
        samples.received = [n - samples.received[0] for n in samples.received]


def by_phase(
    times_s: Sequence[float], carried: Sequence[int], stamps_s: Sequence[float], bins: int = 48
) -> list[float]:
    """Return bytes per second over a step, the mean of several steps in `bins` equal parts.

    Args:
        times_s, carried: As in `Samples`; traffic between two readings is assumed uniform.
        stamps_s: Start of each step, and end of the last.
    """
    begins, lengths = np.asarray(stamps_s[:-1]), np.diff(stamps_s)
    edges = begins[:, None] + lengths[:, None] * np.linspace(0.0, 1.0, bins + 1)
    nbytes = np.diff(np.interp(edges, times_s, carried), axis=1).sum(axis=0)
    rates: list[float] = (nbytes / (lengths.sum() / bins)).tolist()
    return rates
