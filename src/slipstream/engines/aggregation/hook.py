"""`attach`: gradients of a ``DistributedDataParallel`` model are summed by an aggregator.

If the aggregator ends during training, all ranks continue with gloo's ring in the same bucket. If
some ranks have that bucket's sum already, they send it to the others, so that all use the same
bits. No rank can be further ahead, since the next bucket's sum needs data of all ranks.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slipstream.engines.aggregation.member import SILENT_S, WINDOW, AggregatorLostError, JobMember
from slipstream.engines.aggregation.protocol import TOKEN_VARIABLE, AggregationError, parse_address
from slipstream.engines.aggregation.server import JOIN_S
from slipstream.errors import InvalidArgumentError, SlipstreamError, SlipstreamWarning, UsageError
from slipstream.ranks.buckets import BucketThread, need_no_hook
from slipstream.ranks.group import PATIENCE_S, TIMEOUT_S, ProcessGroup

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def attach(
    model: DistributedDataParallel,
    address: str,
    *,
    token: str | None = None,
    mtu: int | None = None,
    fragments: bool = False,
    window: int = WINDOW,
    join_s: float = JOIN_S,
    silent_s: float = SILENT_S,
    timeout_s: float = TIMEOUT_S,
    patience_s: float = PATIENCE_S,
) -> AggregatedGradients:
    """Average the model's gradients through an aggregator, from its next backward pass on.

    All ranks must call it with the same arguments. float16 and bfloat16 are summed in float32.

    Args:
        model: on CPU, without a communication hook.
        address: ``HOST:PORT`` of the aggregator; several with commas, each of which sums its part
            of every bucket. With a tree, of the aggregator above this rank, where it may differ
            between ranks.
        token: the aggregator's token; None for the environment's `TOKEN_VARIABLE`.
        mtu: bytes of the largest packet; None for that of the path, at most 9,000.
        fragments: whether IP may split packets that are larger than the path's MTU; 9,000 bytes
            are then the default.
        window: largest number of datagrams without a result.
        join_s: time limit for all ranks to join.
        silent_s: time without any answer after which the aggregator counts as dead.
        timeout_s: time limit for other ranks to send their gradients, or for one collective of the
            ring.
        patience_s: time limit, after a failure, for every rank to report that it is alive.

    Returns:
        The hook. Without free slots at the aggregator it uses the ring from the beginning, and
        warns.

    Raises:
        InvalidArgumentError: the model is not in DDP or not on CPU, or a number is not allowed.
        UsageError: the model already has a communication hook, or there is no token.
        AggregationError: on all ranks; a rank cannot reach the aggregator, or is refused by it.
        CommunicationError: from ``backward``: ranks sum different buckets, or one exited or hung.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InvalidArgumentError(
            "model", f"is a {type(model).__name__}, not a DistributedDataParallel",
            remedy="call attach(DistributedDataParallel(model), ...)",
        )  # fmt: skip
    devices = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    if devices:
        raise InvalidArgumentError(
            "model", f"its parameters are on {', '.join(sorted(devices))}; gradients are sent from "
            "the CPU only", remedy="use DDP's own all-reduce for devices",
        )  # fmt: skip
    addresses = [text.strip() for text in address.split(",")]
    for text in addresses:
        parse_address(text)
    token = token or os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise UsageError(
            "the aggregator's token is missing",
            remedy=f"set {TOKEN_VARIABLE} to what `slipstream cluster aggregate serve` printed",
        )
    need_no_hook(model)
    ranks = ProcessGroup(model.process_group, timeout_s, patience_s, "aggregation")
    hook = AggregatedGradients(
        ranks,
        lambda job, lost: JobMember(
            addresses, job, ranks.rank, ranks.size, token, mtu=mtu, fragments=fragments,
            window=window, join_s=join_s, silent_s=silent_s, timeout_s=timeout_s, on_lost=lost,
        ),
    )  # fmt: skip
    model.register_comm_hook(hook, _on_bucket)
    return hook


def _on_bucket(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with types
    """Average a bucket of gradients over ranks."""
    return state.submit(bucket.buffer(), bucket.is_last())


class AggregatedGradients:
    """A communication hook and its membership at the aggregator.

    Attributes:
        job: name of the job.
        ring: why gradients use the ring; None while the aggregator sums them.
        switch_s: time in which ranks switched to the ring; None before.
        buckets: number of buckets that the aggregator summed.
    """

    def __init__(
        self, ranks: ProcessGroup, join: Callable[[str, Callable[[], object]], JobMember]
    ) -> None:
        self.ring: str | None = None
        self.switch_s: float | None = None
        self.buckets = 0
        self._ranks, self._thread = ranks, BucketThread("aggregation")
        # Held by the bucket's sum, and by the switch to the ring.
        self._exchange = threading.Lock()
        self._error: SlipstreamError | None = None
        self._sum = self._room = torch.empty(0)
        names: list[Any] = [f"job-{os.urandom(6).hex()}"]
        ranks.run("the job's name", lambda: dist.broadcast_object_list(
            names, group=ranks.group, group_src=0
        ))  # fmt: skip
        self.job = str(names[0])
        self._member = self._join(join)
        atexit.register(self.close)

    def _join(self, join: Callable[[str, Callable[[], object]], JobMember]) -> JobMember | None:
        """Join on all ranks, or on none."""
        member, error = None, None
        try:
            member = join(self.job, self._lost)
        except SlipstreamError as caught:
            error = caught
        ours = None if error is None else (
            type(error) is AggregationError, getattr(error, "admission", False), str(error.what),
            error.remedy,
        )  # fmt: skip
        outcomes: list[Any] = [None] * self._ranks.size
        try:
            self._ranks.run("joining the aggregator", lambda: dist.all_gather_object(
                outcomes, ours, group=self._ranks.group
            ))  # fmt: skip
        except SlipstreamError:
            if member is not None:
                member.close(clean=False)
            raise
        refused = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None]
        if not refused:
            return member
        if member is not None:
            member.close(clean=False)
        if error is not None and not isinstance(error, AggregationError):
            raise error
        _, _, what, remedy = refused[0][1]
        if all(outcome[1] for _, outcome in refused):
            self._use_ring(what)
            return None
        raise AggregationError(
            what, ranks=tuple(rank for rank, _ in refused), remedy=remedy
        ) from error

    def submit(self, flat: torch.Tensor, last: bool) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket, [n], in the thread of buckets."""
        return self._thread.submit(flat, lambda: self._average(flat), last)

    def close(self) -> None:
        """Leave the job, after the last step on all ranks."""
        atexit.unregister(self.close)
        if self._member is not None:
            self._member.close()

    def _average(self, flat: torch.Tensor) -> None:
        with self._exchange:
            if self._error is not None:
                raise self._error
            if self.ring is None and self._sum_at_aggregator(flat):
                torch.div(self._sum, self._ranks.size, out=flat)
                return
        self._ranks.run("a bucket of gradients", lambda: self._reduce(flat))

    def _sum_at_aggregator(self, flat: torch.Tensor) -> bool:
        """Return whether `_sum` has the sum of a bucket; otherwise ranks have switched."""
        assert self._member is not None
        vector = flat.to(_WIDER.get(flat.dtype, flat.dtype))
        if self._sum.dtype is not vector.dtype or self._room.numel() < vector.numel():
            self._room = torch.empty(vector.numel(), dtype=vector.dtype)
        # The last sum is overwritten only once all ranks have it: they all send to this one.
        self._sum = self._room[: vector.numel()]
        try:
            self._member.sum(vector, self._sum)
        except AggregatorLostError as error:
            return self._switch(error.what)
        self.buckets += 1
        return True

    def _reduce(self, flat: torch.Tensor) -> None:
        dist.all_reduce(flat, group=self._ranks.group)
        flat.div_(self._ranks.size)

    def _lost(self) -> None:
        """Switch to the ring while no bucket is being summed; called from another thread."""
        with self._exchange:
            if self.ring is not None or self._error is not None or self._member is None:
                return
            try:
                self._member.need_alive()
            except AggregatorLostError as error:
                try:
                    self._switch(error.what)
                except SlipstreamError as failure:
                    self._error = failure
            except SlipstreamError as failure:
                self._error = failure

    def _switch(self, why: str) -> bool:
        """Switch to the ring on all ranks; return whether this one received the pending `_sum`.

        Raises:
            CommunicationError: a rank exited or hangs.
        """
        began = time.perf_counter()
        received = self._ranks.run("switching to the ring", self._share_last_sum)
        self.switch_s = time.perf_counter() - began
        self._use_ring(why)
        return received

    def _share_last_sum(self) -> bool:
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self._ranks.size)]
        dist.all_gather(counts, torch.tensor([self.buckets]), group=self._ranks.group)
        buckets = [int(count) for count in counts]
        ahead = max(buckets)
        if min(buckets) < ahead:
            dist.broadcast(self._sum, group=self._ranks.group, group_src=buckets.index(ahead))
        return self.buckets < ahead

    def _use_ring(self, why: str) -> None:
        self.ring = why
        warnings.warn(
            f"gradients of job '{self.job}' use the ring: {why}", SlipstreamWarning, stacklevel=2
        )
