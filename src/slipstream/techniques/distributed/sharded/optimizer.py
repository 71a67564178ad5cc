"""`ShardedUpdate`: wraps an optimizer so that every rank updates its share of the parameters.

Gradients are reduce-scattered, so that a rank gets the mean of its slices only; the optimizer steps
on views of these slices and keeps state for them alone; the new parameters are all-gathered. Each
element is computed on a single rank, so that all ranks have the same bits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.ranks.buckets import BucketThread, need_no_hook
from slipstream.ranks.group import PATIENCE_S, TIMEOUT_S, ProcessGroup
from slipstream.ranks.lines import Line, gather, scatter
from slipstream.techniques.distributed.exposed import ExposedTimes, put_hook
from slipstream.techniques.distributed.optimizers import (
    ELEMENTWISE,
    WrappingOptimizer,
    fingerprint,
    loss_of,
    need_optimizer,
    parameters_of,
)
from slipstream.techniques.distributed.sharded import checkpoint
from slipstream.techniques.distributed.sharded.layerwise import Layerwise, squares
from slipstream.techniques.distributed.sharded.shards import Shards, flat_view, is_dense


class ShardedUpdate(WrappingOptimizer):
    """An optimizer that updates a share of the parameters on each rank: ZeRO-1.

    The parameters equal those of the unsharded optimizer up to rounding; its state takes 1 / ranks
    of the memory and its step 1 / ranks of the time. Learning rate schedules, groups, momenta and
    ``GradScaler`` work unchanged. Clip gradients with `clip_grad_norm_`, since each rank has the
    mean of its own slices only.

    Args:
        optimizer: SGD, Adam, AdamW or another elementwise optimizer of torch, or Lars or Lamb of
            `slipstream.distributed`. Its parameters are dense, on CPU and equal on all ranks.
        model: a ``DistributedDataParallel`` without a communication hook, whose gradients are
            reduce-scattered per bucket during the backward pass. None for a plain model, whose
            gradients are reduce-scattered in `step`.
        group: process group; None for that of the model, or the default group.
        timeout_s: time limit of one communication.
        patience_s: time limit, after a failure, for every rank to report that it is alive.

    Raises:
        InvalidArgumentError: the optimizer, its parameters or the model cannot be sharded.
        UsageError: no process group is initialised, the model has a hook, or the optimizer
            already communicates.
        CommunicationError: ranks disagree on settings, shapes or weights. From ``backward`` and
            `step`: a rank exited, hung, or made a different call.

    Source: Xu et al., 2020, arXiv 2004.13336; Rajbhandari et al., SC 2020, arXiv 1910.02054.
    """

    slipstream_exchanges = "is a ShardedUpdate"

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: DistributedDataParallel | None = None, *,
        group: Any = None, timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        _check_optimizer(optimizer)
        parameters = parameters_of(optimizer)
        _check_parameters(optimizer, parameters)
        if model is not None:
            _check_model(model, parameters)
            group = model.process_group if group is None else group
        super().__init__(optimizer)
        self.skipped = 0
        """Number of steps skipped because a ``GradScaler`` found an overflow."""
        self._group = ProcessGroup(group, timeout_s, patience_s, "sharded_update")
        wire = self._group.wire
        self.rank, self.ranks = wire.rank, wire.size
        self._line = Line.of(wire)
        dtypes = dict.fromkeys(p.dtype for p in parameters)
        self._shards = [Shards([p for p in parameters if p.dtype == d], self.ranks) for d in dtypes]
        self._of = {id(p): shards for shards in self._shards for p in shards.parameters}
        self._pieces = {id(p): self._slice(p, p) for p in parameters}
        self._agree(parameters)
        checkpoint.shard_state(self.state, self._pieces, parameters, self._slice)
        if isinstance(optimizer, Layerwise):
            optimizer.sum_squares = self._sum_over_ranks
        self._reduced, self._finite = False, True
        self._exposed: ExposedTimes | None = None
        self._thread = BucketThread("sharded-update")
        if model is not None:
            put_hook(model, self._on_bucket, self._group)

    # ---- gradients ---------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Replace each rank's slices of the gradients by their means over ranks; `step` calls it.

        Elements outside the slice are undefined afterwards. With a `model`, its backward pass has
        already averaged them.
        """
        if self._reduced:
            return
        for shards in self._shards:
            used = self._used(shards)
            gradients = []
            for number in used:
                p = shards.parameters[number]
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                gradients.append(p.grad)
            self._reduce(shards, used, gradients, "gradients of a step")
        self._reduced = True

    def _used(self, shards: Shards) -> list[int]:
        """Return the indices of parameters that have a gradient on any rank."""
        flags = torch.tensor([p.grad is not None for p in shards.parameters], dtype=torch.uint8)
        self._all_reduce(flags, dist.ReduceOp.MAX)
        return torch.nonzero(flags).view(-1).tolist()

    def _reduce(
        self, shards: Shards, numbers: Sequence[int], gradients: Sequence[torch.Tensor], where: str
    ) -> None:
        """Replace our slices of the gradients of parameters `numbers` by means over ranks."""
        if self.ranks == 1 or not numbers:
            return
        # Gradients with other strides than the parameter are copied, and copied back.
        aligned = [
            _as_memory(g, shards.parameters[n]) for n, g in zip(numbers, gradients, strict=True)
        ]
        flats = [flat_view(tensor) for tensor in aligned]
        rows = [shards.pack(numbers, flats, rank) for rank in range(self.ranks)]
        own = rows[self.rank]
        self._group.run(where, lambda: scatter(self._line, rows, own, "auto", self.ranks))
        shards.unpack(own, numbers, flats, self.rank)
        for gradient, tensor in zip(gradients, aligned, strict=True):
            if tensor is not gradient:
                gradient.copy_(tensor)

    def _on_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if self._reduced:
            raise UsageError(
                "gradients were averaged twice without a step in between",
                remedy="run all backward passes but the last inside model.no_sync(), or call "
                "zero_grad() of this optimizer after a skipped step",
            )
        parameters, gradients = bucket.parameters(), bucket.gradients()
        shards = self._of[id(parameters[0])]
        numbers = [shards.place[id(p)] for p in parameters]
        last = bool(bucket.is_last())

        def work() -> None:
            self._reduce(shards, numbers, gradients, "a bucket of gradients")
            slices = [self._slice(p, g) for p, g in zip(parameters, gradients, strict=True)]
            self._finite &= all(bool(values.isfinite().all()) for values in slices)
            if last:
                self._share_overflow(shards, numbers, gradients)

        future = self._thread.submit(bucket.buffer(), work, last)
        self._reduced = last
        return future

    def _share_overflow(
        self, shards: Shards, numbers: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Make an overflow on any rank visible to the GradScaler of this rank."""
        if self.ranks > 1 and self._any(not self._finite):
            largest = max(zip(numbers, gradients, strict=True), key=lambda pair: pair[1].numel())
            # If the slice is the whole tensor, overwrite it: the step is skipped anyway.
            outside = shards.outside(*largest, self.rank)
            (outside if outside.numel() else largest[1]).fill_(torch.inf)
        self._finite = True

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the total norm of the averaged gradients to `max_norm`; return the norm before."""
        self.reduce_gradients()
        gradients = [(p, p.grad) for p in self._all() if p.grad is not None]
        slices = [self._slice(p, gradient) for p, gradient in gradients]
        total = sum((squares(values) for values in slices), torch.zeros((), dtype=torch.float64))
        norm = float(self._sum_over_ranks(total).sqrt())
        # As torch.nn.utils.clip_grad_norm_; NaN if the norm is NaN.
        factor = max_norm / (norm + 1e-6)
        if not factor >= 1.0:
            # Scale whole gradients: with other strides a slice is a copy.
            for _, gradient in gradients:
                gradient.mul_(factor)
        return norm

    # ---- the step ----------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Average gradients, update this rank's share, gather parameters; return the loss."""
        loss = loss_of(closure)
        with torch.no_grad():
            self._unscale(self._all())
            self.reduce_gradients()
            self._reduced = False
            if self._overflowed():
                self.skipped += 1
                return loss
            self._update()
            began = time.perf_counter()
            for shards in self._shards:
                self._gather(shards)
            if self._exposed is not None:
                self._exposed.add(began, time.perf_counter(), (), "all_gather of parameters")
        return loss

    def report_exposed(self, exposed: ExposedTimes | None) -> None:
        """Report every wait for new parameters to `exposed` from now on; None stops."""
        self._exposed = exposed

    def _update(self) -> None:
        for p in self._all():
            # Slice again, because user code may have replaced the parameter's storage.
            piece = self._pieces[id(p)]
            piece.data = self._slice(p, p)
            piece.grad = None if p.grad is None else self._slice(p, p.grad)
        with self._sliced_groups():
            self.optimizer.step()
        for piece in self._pieces.values():
            piece.grad = None

    def _gather(self, shards: Shards) -> None:
        """All-gather the slices of the parameters."""
        if self.ranks == 1:
            return
        numbers = range(len(shards.parameters))
        flats = [flat_view(p) for p in shards.parameters]
        rows = [
            torch.empty(shards.length(r, numbers), dtype=shards.dtype) for r in range(self.ranks)
        ]
        rows[self.rank] = shards.pack(numbers, flats, self.rank)
        self._group.run("new parameters", lambda: gather(self._line, rows, "auto"))
        for rank, row in enumerate(rows):
            if rank != self.rank:
                shards.unpack(row, numbers, flats, rank)

    def _overflowed(self) -> bool:
        """Whether a GradScaler, if one calls, found infinities on any rank."""
        overflow = getattr(self, "found_inf", None)
        if overflow is None:
            return False
        # The sum over ranks may overflow even if each rank's gradient is finite.
        slices = [self._slice(p, p.grad) for p in self._all() if p.grad is not None]
        finite = not overflow.item() and all(bool(values.isfinite().all()) for values in slices)
        return self._any(not finite)

    def _any(self, flag_here: bool) -> bool:
        """Whether the flag is set on any rank."""
        flag = torch.tensor([flag_here], dtype=torch.uint8)
        self._all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._reduced = False
        super().zero_grad(set_to_none)

    # ---- state -------------------------------------------------------------------------------

    def memory(self) -> checkpoint.StateMemory:
        """Return the bytes of the optimizer's state, on this rank and unsharded."""
        return checkpoint.memory(self.state, self._pieces, self._all())

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's share, to be saved by every rank and restored with as many ranks.

        To restore with another number of ranks, use `full_state_dict`.
        """
        position = {"rank": self.rank, "ranks": self.ranks}
        with self._sliced_groups():
            return {**self.optimizer.state_dict(), checkpoint.KEY: position}

    def full_state_dict(self) -> dict[str, Any]:
        """Return the unsharded optimizer's ``state_dict``; all ranks must call it.

        The unsharded optimizer can load it, and so can this one with any number of ranks.

        Raises:
            CommunicationError: some ranks did not call it within 25 s.
        """
        self._group.need_same_call("full_state_dict", torch.zeros(0))
        with self._sliced_groups():
            state = self.optimizer.state_dict()
        return checkpoint.full(state, self._grouped(), self._assembled)

    def _assembled(self, p: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' slices into a tensor like the parameter `p`."""
        shards = self._of[id(p)]
        whole = torch.empty_like(p, dtype=share.dtype, requires_grad=False)
        number, flat = shards.place[id(p)], flat_view(whole)
        rows = [shards.slice(number, flat, rank) for rank in range(self.ranks)]
        rows[self.rank].copy_(share)
        self._group.run("full_state_dict", lambda: gather(self._line, rows, "auto"))
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore this rank's `state_dict`, or a full one of any number of ranks.

        Raises:
            InvalidArgumentError: it is the share of another rank or number of ranks, or belongs
                to other parameters.
        """
        share = checkpoint.own_share(
            state_dict, self._grouped(), self._slice, self.rank, self.ranks
        )
        with self._sliced_groups():
            try:
                self.optimizer.load_state_dict(share)
            except ValueError as error:
                raise InvalidArgumentError("state_dict", str(error)) from error
        self._reduced = False

    @contextlib.contextmanager
    def _sliced_groups(self) -> Iterator[None]:
        """Replace the parameters in the optimizer's groups by our slices temporarily."""
        originals = [group["params"] for group in self.optimizer.param_groups]
        for group, params in zip(self.optimizer.param_groups, originals, strict=True):
            group["params"] = [self._pieces.get(id(p), p) for p in params]
        try:
            yield
        finally:
            for group, params in zip(self.optimizer.param_groups, originals, strict=True):
                group["params"] = params
            self._share()

    # ---- the parameters ----------------------------------------------------------------------

    def _all(self) -> list[torch.Tensor]:
        return [p for shards in self._shards for p in shards.parameters]

    def _grouped(self) -> list[torch.Tensor]:
        """Return the parameters in the order of a state_dict."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _slice(self, p: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of a tensor like the parameter `p`; a view for equal strides."""
        shards = self._of[id(p)]
        return shards.slice(shards.place[id(p)], flat_view(_as_memory(like, p)), self.rank)

    def _agree(self, parameters: list[torch.Tensor]) -> None:
        if self.ranks == 1:
            return
        group = self._group
        group.agree(type(self.optimizer).__name__, "optimizer")
        shapes = [f"{p.dtype} {list(p.shape)} {p.stride()}" for p in parameters]
        group.agree(", ".join(shapes), "list of parameters")
        group.agree(fingerprint(parameters), "start")

    def _all_reduce(self, tensor: torch.Tensor, operation: Any) -> None:
        if self.ranks > 1:
            self._group.run(
                "ShardedUpdate.step",
                lambda: dist.all_reduce(tensor, operation, group=self._group.group),
            )

    def _sum_over_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        self._all_reduce(numbers, dist.ReduceOp.SUM)
        return numbers


def _as_memory(tensor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return `tensor` with the strides of `p`, copied only if they differ."""
    if tensor.layout != torch.strided:
        raise InvalidArgumentError(
            "gradient",
            f"it is {tensor.layout}",
            remedy="use dense gradients, such as sparse=False in the embedding",
        )
    if tensor.stride() == p.stride() or tensor.numel() <= 1:
        return tensor
    return torch.empty_like(p, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def _check_optimizer(optimizer: Any) -> None:
    need_optimizer(optimizer)
    if type(optimizer) not in ELEMENTWISE and not isinstance(optimizer, Layerwise):
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise InvalidArgumentError(
            "optimizer", f"{type(optimizer).__name__} may not be elementwise",
            remedy=f"use one of {names}, or Lars, Lamb of slipstream.distributed",
        )  # fmt: skip


def _check_parameters(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    frozen = [p for g in optimizer.param_groups for p in g["params"] if not p.requires_grad]
    if frozen:
        raise InvalidArgumentError(
            "optimizer", f"{len(frozen)} of its parameters have requires_grad=False",
            remedy="pass [p for p in model.parameters() if p.requires_grad]",
        )  # fmt: skip
    for number, p in enumerate(parameters):
        if not is_dense(p):
            raise InvalidArgumentError(
                f"optimizer.parameters[{number}]", f"its strides {p.stride()} leave gaps",
                remedy="call p.data = p.data.contiguous() first",
            )  # fmt: skip


def _check_model(model: Any, parameters: list[torch.Tensor]) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise InvalidArgumentError(
            "model", f"is a {type(model).__name__}, not a DistributedDataParallel",
            remedy="omit it for a plain model",
        )  # fmt: skip
    need_no_hook(model)
    ours = {id(p) for p in parameters}
    named = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
    left_out = [name for name, p in named.items() if id(p) not in ours]
    if left_out or len(ours) != len(named):
        why = (
            f"'{left_out[0]}' is not in the optimizer"
            if left_out
            else "the optimizer has additional ones"
        )
        raise InvalidArgumentError(
            "model", f"its parameters are not those of the optimizer: {why}",
            remedy="freeze parameters that are not trained, or omit the model",
        )  # fmt: skip
