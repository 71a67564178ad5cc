"""Bytes on the wire: payload of collectives, and traffic of a network interface over time.

`count_bytes` observes, through the dispatcher, every collective of `torch.distributed` that the
body starts in this rank, whether from Python, DDP or functional collectives. It converts each
buffer's size to the bytes that this rank must send under the bandwidth-optimal algorithm (ring for
all-reduce; Thakur, Rabenseifner and Gropp, 2005): the *payload*. `Interface` reads the bytes that
a network interface sent and received, including headers: the *wire*. Wire / payload - 1 is the
protocol overhead.

Counting slows each operator by some microseconds, so do not count and time the same run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import MeasurementError, UnknownNameError

if TYPE_CHECKING:
    import torch

# Counters of the thread's network namespace; /sys/class/net shows that of its mount.
_COUNTERS = Path("/proc/thread-self/net/dev")
_MAX_DELAY_S = 0.001


@dataclass(frozen=True)
class Collective:
    """One collective, from the perspective of this rank.

    Attributes:
        operation: ``"all_reduce"``, ``"broadcast"``, ``"send"``, ...
        step: Number of preceding calls of `Traffic.next_step`.
        ranks: Size of its process group.
        buffer_bytes: Size of the whole buffer: the reduced input, or the gathered result.
        sent_bytes: Bytes that this rank must send; an equal share for broadcast and reduce.
    """

    operation: str
    step: int
    ranks: int
    buffer_bytes: int
    sent_bytes: float


@dataclass
class Traffic:
    """Collectives of one rank so far."""

    rank: int = 0
    step: int = 0
    collectives: list[Collective] = field(default_factory=list)

    @property
    def sent_bytes(self) -> float:
        """Payload that this rank must send, over all steps."""
        return sum(collective.sent_bytes for collective in self.collectives)

    def next_step(self) -> None:
        """Assign further collectives to the next step."""
        self.step += 1


# The collective and the position of its whole buffer, by the dispatcher's name without underscores
# and "coalesced". Outputs come first in c10d's signatures; functional ones have only the input.
_WHOLE_BUFFER = {
    "allreduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 0),
    "allgatherbase": ("all_gather", 0),
    "allgatherintotensor": ("all_gather", 0),
    "reducescatter": ("reduce_scatter", 1),
    "reducescatterbase": ("reduce_scatter", 1),
    "reducescattertensor": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoallbase": ("all_to_all", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "send": ("send", 0),
}
# Functional collectives: the argument is this rank's input; all_gather's buffer is p times that.
_FUNCTIONAL = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "allgatherintotensor": "all_gather",
    "allgatherintotensorout": "all_gather",
    "reducescattertensor": "reduce_scatter",
    "reducescattertensorout": "reduce_scatter",
    "alltoallsingle": "all_to_all",
    "isend": "send",
}


def sent_by_rank(operation: str, buffer_bytes: int, ranks: int, *, is_root: bool = False) -> float:
    """Return the bytes that one of `ranks` sends for a buffer under the optimal algorithm.

    For scatter the buffer is the root's whole input, for gather one rank's part.

    Raises:
        UnknownNameError: The collective is unknown.
    """
    share = (ranks - 1) / ranks
    if operation == "all_reduce":
        return 2 * share * buffer_bytes
    if operation in ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"):
        return share * buffer_bytes
    if operation == "gather":
        return 0.0 if is_root else float(buffer_bytes)
    if operation == "scatter":
        return share * buffer_bytes if is_root else 0.0
    if operation == "send":
        return float(buffer_bytes)
    names = {name for name, _ in _WHOLE_BUFFER.values()}
    raise UnknownNameError("collective", operation, names)


@contextmanager
def count_bytes() -> Iterator[Traffic]:
    """Count the payload of every collective started in the body, in this thread.

    Raises:
        MeasurementError: `torch.distributed` is not initialized.
    """
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    if not (dist.is_available() and dist.is_initialized()):
        raise MeasurementError(
            "torch.distributed has no process group",
            remedy="call torch.distributed.init_process_group first",
        )
    traffic = Traffic(rank=dist.get_rank())

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace in ("c10d", "_c10d_functional"):
                _count(traffic, func, args)
            return func(*args, **(kwargs or {}))

    with Counting():
        yield traffic


def _count(traffic: Traffic, func: Any, args: tuple[Any, ...]) -> None:
    name = func._schema.name.split("::")[1].replace("_", "").removesuffix("coalesced")
    arguments = {
        spec.name: value for spec, value in zip(func._schema.arguments, args, strict=False)
    }
    if func.namespace == "c10d":
        if name not in _WHOLE_BUFFER:
            return
        operation, position = _WHOLE_BUFFER[name]
        ranks, my_rank = _group_of(arguments["process_group"])
        buffer = _bytes(args[position])
    else:
        if name not in _FUNCTIONAL:
            return
        operation = _FUNCTIONAL[name]
        ranks, my_rank = _group_of(arguments["group_name"])
        buffer = _bytes(args[0]) * (ranks if operation == "all_gather" else 1)
    is_root = arguments.get("root_rank") == my_rank
    sent = sent_by_rank(operation, buffer, ranks, is_root=is_root)
    traffic.collectives.append(Collective(operation, traffic.step, ranks, buffer, sent))


def _group_of(group: Any) -> tuple[int, int]:
    """Return the size of a process group and this rank in it, from a name or boxed group."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if isinstance(group, str):
        resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
        group = resolve(group)
    if not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return group.size(), group.rank()


def _bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(_bytes(item) for item in value)
    tensor: torch.Tensor = value
    return tensor.numel() * tensor.element_size()


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
