"""`two_d_allreduce`, and the same as a communication hook of ``DistributedDataParallel``."""

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
    """Put the sum of all ranks' tensors in their place, by rows and columns of the ranks.

    Pays where ranks of a row are joined by faster links than rows are: 1 / (ranks in a row) of the
    bytes cross, for every rank of it. All ranks have the same bits afterwards.

    Args:
        tensor: float32, float64, float16 or bfloat16 on a processor, of the same shape on all
            ranks, in any strides.
        rows: of the grid, such as racks or hosts; ranks are numbered row by row.
        mean: divide by the number of ranks.
        group: the processes; None: all.
        algorithm: ``2d``; ``flat``, the ring of gloo; ``auto``: what `cluster` says is faster.
        cluster: the machines that the ranks run on, in their order.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: an argument that is none of these; `rows` does not divide the ranks.
        CommunicationError: on every rank: they disagree on shape, dtype or settings, or one of
            them ended or hung (after 25 s at most); the tensor then is of no use.

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
    """What `two_d_hook` keeps: ``model.register_comm_hook(TwoDState(rows=2), two_d_hook)``.

    Args:
        rows, group, algorithm, cluster: see `two_d_allreduce`; ``auto`` chooses for every bucket.
        timeout_s: how long a rank waits for the others in one communication.
        patience_s: how long, after a failure, all are given to say that they live.
        model: that the hook is for; its buffers are then broadcast within the same limits.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: an argument that is none of these.
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
        # Ranks with unlike clusters would choose differently, and wait for each other.
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
    """The mean of a bucket's gradients, by rows and columns of the ranks.

    Raises:
        CommunicationError: from ``backward``: a rank ended, or does something else than the others.
    """
    if not isinstance(state, TwoDState):
        raise InvalidArgumentError("state", f"is a {type(state).__name__}, not a TwoDState")
    return state.submit(bucket.buffer(), bucket.is_last())


def reduce_flat(flat: torch.Tensor, ranks: ProcessGroup, rows: int, way: str, divisor: int) -> None:
    """Put the sum over ranks, divided, in the place of `flat`, [n], contiguous."""
    if ranks.wire.size == 1:
        return
    if way == "2d":
        grid.all_reduce(flat, ranks.wire, rows, divisor)
        return
    dist.all_reduce(flat, group=ranks.wire.group)
    if divisor != 1:
        flat.div_(divisor)


def need_rows(rows: int, ranks: int) -> None:
    """Raise an `InvalidArgumentError` unless so many ranks make `rows` rows."""
    rows = as_integer("rows", rows, None)
    if rows < 1 or ranks % rows:
        raise InvalidArgumentError(
            "rows", f"{ranks} ranks do not make {rows} rows",
            remedy="one of " + ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0),
        )  # fmt: skip


def _way(algorithm: str, cluster: Cluster | None, nbytes: int, ranks: int, rows: int) -> str:
    if algorithm not in ALGORITHMS:
        raise InvalidArgumentError(
            "algorithm", f"'{algorithm}' is none", remedy=" or ".join(ALGORITHMS)
        )
    return chosen(cluster, nbytes, ranks, rows) if algorithm == "auto" else algorithm
