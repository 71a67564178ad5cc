"""Bytes that a rank must send for the collectives of `torch.distributed`.

`count_bytes` observes, through the dispatcher, every collective that the body starts in this rank,
whether from Python, DDP or functional collectives. It converts each buffer's size to the bytes that
this rank must send under the bandwidth-optimal algorithm (ring for all-reduce; Thakur, Rabenseifner
and Gropp, 2005): the *payload*. Bytes on the wire / payload - 1 is the protocol overhead.

Counting slows each operator by some microseconds, so do not count and time the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.errors import MeasurementError, UnknownNameError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Collective:
    """One collective, from the perspective of this rank.

    Attributes:
        operation: ``"all_reduce"``, ``"broadcast"``, ``"send"``, ...
        ranks: Size of its process group.
        buffer_bytes: Size of the whole buffer: the reduced input, or the gathered result.
        sent_bytes: Bytes that this rank must send; an equal share for broadcast and reduce.
    """

    operation: str
    ranks: int
    buffer_bytes: int
    sent_bytes: float


@dataclass
class Traffic:
    """Collectives of one rank so far."""

    rank: int = 0
    collectives: list[Collective] = field(default_factory=list)

    @property
    def sent_bytes(self) -> float:
        """Payload that this rank must send."""
        return sum(collective.sent_bytes for collective in self.collectives)


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
    traffic.collectives.append(Collective(operation, ranks, buffer, sent))


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
