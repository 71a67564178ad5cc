"""Bytes on the wire: what collectives must carry, and what an interface really carried, and when.

`count_bytes` watches every collective of `torch.distributed` that the body starts in this rank,
from Python, DDP or functional collectives alike, through the dispatcher. It converts each
buffer's size into the bytes this rank has to send under the bandwidth-optimal algorithm (ring for
all-reduce; Thakur, Rabenseifner and Gropp, 2005). That is the *payload*. `Interface` reads what
left and entered a network interface, headers included: the *wire*. Wire / payload - 1 is the
protocol's overhead.

Counting slows each operator by some microseconds: count steps and time them in different runs.
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

# The counters of the thread's own network namespace; /sys/class/net shows that of its mount.
_COUNTERS = Path("/proc/thread-self/net/dev")
_HELD_UP_S = 0.001


@dataclass(frozen=True)
class Collective:
    """One collective as this rank saw it.

    Attributes:
        operation: ``"all_reduce"``, ``"broadcast"``, ``"send"``, ...
        step: how often `Traffic.next_step` had been called.
        ranks: size of its process group.
        buffer_bytes: size of the whole buffer: what is reduced, or the gathered result.
        sent_bytes: what this rank has to send; for broadcast and reduce an equal share.
    """

    operation: str
    step: int
    ranks: int
    buffer_bytes: int
    sent_bytes: float


@dataclass
class Traffic:
    """What one rank's collectives carried so far."""

    rank: int = 0
    step: int = 0
    collectives: list[Collective] = field(default_factory=list)

    @property
    def sent_bytes(self) -> float:
        """Payload this rank has to send, all steps together."""
        return sum(one.sent_bytes for one in self.collectives)

    def next_step(self) -> None:
        """What follows belongs to the next step."""
        self.step += 1


# By the dispatcher's name without underscores and "coalesced": what it is, and which argument is
# the whole buffer. "out" arguments come first in c10d's signatures, functional ones have only the
# input.
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
    """Bytes one of `ranks` sends for a buffer of `buffer_bytes` under the optimal algorithm.

    For scatter the buffer is the root's whole input, for gather one rank's part.

    Raises:
        UnknownNameError: no such collective.
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
    known = {name for name, _ in _WHOLE_BUFFER.values()}
    raise UnknownNameError("collective", operation, known)


@contextmanager
def count_bytes() -> Iterator[Traffic]:
    """Count the payload of every collective started in the body, in this thread.

    Raises:
        MeasurementError: `torch.distributed` is not initialised.
    """
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    if not (dist.is_available() and dist.is_initialized()):
        raise MeasurementError(
            "there is no process group to count in",
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
    """Size of a process group and our rank in it, from its name or what the dispatcher has."""
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
    """Counters of a network interface: bytes out and in since this object was made.

    Raises:
        UnknownNameError: this machine has no such interface.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._received, self._sent = self._read()

    @property
    def sent_bytes(self) -> int:
        """Bytes that left, headers included."""
        return self._read()[1] - self._sent

    @property
    def received_bytes(self) -> int:
        """Bytes that came in, headers included."""
        return self._read()[0] - self._received

    def _read(self) -> tuple[int, int]:
        """Bytes received and sent since the interface exists."""
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
    """What an interface had carried at several moments.

    Attributes:
        times_s: by `time.perf_counter`, ascending.
        sent, received: bytes since the first of them, headers included.
    """

    times_s: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)


@contextmanager
def sampled(interface: Interface, every_s: float) -> Iterator[Samples]:
    """Read the counters at least when the body begins and when it ends, and in between by a thread.

    A reading takes about 50 microseconds of a core.

    Args:
        every_s: between two readings; more where no core is free.
    """
    samples, ended = Samples(), threading.Event()

    def read(*, always: bool = False) -> None:
        before = time.perf_counter()
        received, sent = interface._read()
        after = time.perf_counter()
        # Whoever was held up between the two does not know when the counters were so.
        if always or after - before < _HELD_UP_S:
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
    """Bytes a second over a step: a mean of several steps, each cut into `bins` equal parts.

    Args:
        times_s, carried: as of `Samples`; between two readings bytes are taken to flow evenly.
        stamps_s: when each step begins, and when the last one ends.
    """
    begins, lengths = np.asarray(stamps_s[:-1]), np.diff(stamps_s)
    edges = begins[:, None] + lengths[:, None] * np.linspace(0.0, 1.0, bins + 1)
    nbytes = np.diff(np.interp(edges, times_s, carried), axis=1).sum(axis=0)
    rates: list[float] = (nbytes / (lengths.sum() / bins)).tolist()
    return rates
