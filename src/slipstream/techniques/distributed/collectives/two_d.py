"""`two_d_allreduce`, as a function and as a hook of ``DistributedDataParallel``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.ranks.buckets import BucketThread
from slipstream.ranks.buffers import limit_buffers
from slipstream.ranks.group import PATIENCE_S, TIMEOUT_S, ProcessGroup, process_group
from slipstream.ranks.wire import need_dense
from slipstream.techniques.distributed.collectives import grid
from slipstream.techniques.distributed.collectives.choice import chosen

if TYPE_CHECKING:
    from slipstream.cluster import Cluster

ALGORITHMS = ("auto", "2d", "flat")


def two_d_allreduce(
    tensor: torch.Tensor, rows: int, *, mean: bool = False, group: Any = None,
    algorithm: str = "2d", cluster: Cluster | None = None,
) -> None:  # fmt: skip
    """Sum all ranks' tensors in place, along rows and columns of the ranks.

    Faster than a ring if links within a row are faster than links between rows: each rank sends
    only 1 / (ranks in a row) of the bytes to other rows. All ranks end with the same bits.

    Args:
        tensor: float32, float64, float16 or bfloat16 on CPU, of the same shape on all ranks, with
            any strides.
        rows: number of rows, such as racks or hosts; ranks are numbered row by row.
        mean: divide by the number of ranks.
        group: process group; None for the default group.
        algorithm: ``2d``; ``flat``, gloo's ring; or ``auto``, the faster one on `cluster`.
        cluster: the machines that the ranks run on, in rank order.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: an argument is not one of these, or `rows` does not divide the ranks.
        CommunicationError: on every rank: ranks disagree on shape, dtype or settings, or one
            exited or hung (after 25 s at most); the tensor's content is then undefined.

    Source: Kumar et al., MLSys 2021, arXiv 2011.03641.
    """
    need_dense(tensor)
    ranks = process_group(group)
    size = ranks.wire.size
    need_rows(rows, size)
    way = _way(algorithm, cluster, tensor.numel() * tensor.element_size(), size, rows)
    ranks.need_same_call("two_d_allreduce", tensor, f"{rows} {mean} {way}")
    values = tensor.detach()
    flat = values.contiguous().view(-1)
    ranks.run("two_d_allreduce", lambda: reduce_flat(flat, ranks, rows, way, size if mean else 1))
    if flat.data_ptr() != values.data_ptr():
        values.copy_(flat.view(values.shape))


class TwoDState:
    """State of `two_d_hook`: ``model.register_comm_hook(TwoDState(rows=2), two_d_hook)``.

    Args:
        rows, group, algorithm, cluster: see `two_d_allreduce`; ``auto`` chooses per bucket.
        timeout_s: time limit of one communication.
        patience_s: time limit, after a failure, for every rank to report that it is alive.
        model: the hooked model; its buffers are then broadcast within the same limits.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: an argument is not one of these.
        CommunicationError: ranks disagree on the settings.
    """

    def __init__(
        self, rows: int, group: Any = None, *, algorithm: str = "2d",
        cluster: Cluster | None = None, timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S, model: DistributedDataParallel | None = None,
    ) -> None:  # fmt: skip
        self.ranks = ProcessGroup(group, timeout_s, patience_s, "two_d_hook")
        self.rows, self.algorithm, self.cluster = rows, algorithm, cluster
        size = self.ranks.wire.size
        need_rows(rows, size)
        # Ranks with different clusters would choose differently, and wait for each other.
        ways = [_way(algorithm, cluster, 1 << k, size, rows) for k in range(10, 31)]
        self.ranks.need_same_call("two_d_hook", torch.zeros(0), f"{rows} {algorithm} {ways}")
        self._thread = BucketThread("two-d")
        if model is not None:
            limit_buffers(model, self.ranks)

    def submit(self, flat: torch.Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        size, nbytes = self.ranks.wire.size, flat.numel() * flat.element_size()
        way = _way(self.algorithm, self.cluster, nbytes, size, self.rows)
        work = partial(reduce_flat, flat, self.ranks, self.rows, way, size)
        named = partial(self.ranks.run, "a bucket of gradients", work)
        return self._thread.submit(flat, named, last)


def two_d_hook(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with types
    """Average a bucket's gradients along rows and columns of the ranks.

    Raises:
        CommunicationError: from ``backward``: a rank exited, or made a different call.
    """
    if not isinstance(state, TwoDState):
        raise InvalidArgumentError("state", f"is a {type(state).__name__}, not a TwoDState")
    return state.submit(bucket.buffer(), bucket.is_last())


def reduce_flat(flat: torch.Tensor, ranks: ProcessGroup, rows: int, way: str, divisor: int) -> None:
    """Replace `flat`, [n], contiguous, by the sum over ranks, divided by `divisor`."""
    if ranks.wire.size == 1:
        return
    if way == "2d":
        grid.all_reduce(flat, ranks.wire, rows, divisor)
        return
    dist.all_reduce(flat, group=ranks.wire.group)
    if divisor != 1:
        flat.div_(divisor)


def need_rows(rows: int, ranks: int) -> None:
    """Raise an `InvalidArgumentError` unless `rows` divides `ranks`."""
    rows = as_integer("rows", rows, None)
    if rows < 1 or ranks % rows:
        raise InvalidArgumentError(
            "rows", f"{ranks} ranks cannot be split into {rows} rows",
            remedy="one of " + ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0),
        )  # fmt: skip


def _way(algorithm: str, cluster: Cluster | None, nbytes: int, ranks: int, rows: int) -> str:
    if algorithm not in ALGORITHMS:
        raise InvalidArgumentError(
            "algorithm", f"'{algorithm}' is unknown", remedy=" or ".join(ALGORITHMS)
        )
    return chosen(cluster, nbytes, ranks, rows) if algorithm == "auto" else algorithm
