"""`AdasumOptimizer`: wraps an optimizer and combines the workers' updates by Adasum.

Each worker steps its optimizer with its own gradients, so that momentum evolves as in training with
one worker; the changes of the weights are combined per layer. If an update is the gradient times
the learning rate (SGD without momentum and decay), gradients are combined instead, which is
equivalent and needs no copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slipstream.errors import InvalidArgumentError
from slipstream.ranks.group import (
    PATIENCE_S,
    TIMEOUT_S,
    ProcessGroup,
    need_processes,
    process_group,
)
from slipstream.techniques.distributed.adasum.exchange import check_algorithm, exchange
from slipstream.techniques.distributed.optimizers import (
    WrappingOptimizer,
    fingerprint,
    loss_of,
    need_optimizer,
    parameters_of,
)

_KEY = "adasum"
_WHERE = "AdasumOptimizer.step"
# Parameters are exchanged in parts, like buckets of DDP, so that the temporary memory of an
# exchange is proportional to a part and not to the model.
_PART_BYTES = 25 << 20


@dataclass
class _Part:
    """Parameters of one dtype, and their offsets in a flat buffer."""

    parameters: list[torch.Tensor]
    starts: Any

    @property
    def numel(self) -> int:
        return int(self.starts[-1])

    def flat(self, tensors: list[torch.Tensor | None]) -> torch.Tensor:
        """Return a buffer with the tensors' elements; zeros for None."""
        buffer = torch.zeros(self.numel, dtype=self.parameters[0].dtype)
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        return buffer

    def undo(self, flat: torch.Tensor) -> None:
        """Restore the parameters from a buffer, and store their change in it."""
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            change = parameter - view
            parameter.copy_(view)
            view.copy_(change)

    def add(self, flat: torch.Tensor) -> None:
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            parameter.add_(view)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.starts[:-1], self.starts[1:], self.parameters, strict=True)
        return [flat[int(a) : int(b)].view(p.shape) for a, b, p in pairs]


class AdasumOptimizer(WrappingOptimizer):
    """An optimizer that combines updates over workers instead of averaging gradients.

    The model must not be wrapped in ``DistributedDataParallel``; all ranks start from the same
    weights and stay bitwise equal. The learning rate is that of a single worker. The state of the
    optimizer differs between workers, and each saves its own.

    Each worker first accumulates the gradients of its micro-batches, unscales them with a
    ``GradScaler`` and clips them; then it calls `step`. If the gradients of any worker are not
    finite, all workers skip the step. Buffers, such as batch norm statistics, are not combined:
    average them with `average_buffers`.

    Args:
        optimizer: any optimizer of dense parameters on CPU.
        group: process group; None for the default group.
        algorithm: ``gram``, ``rvh`` or ``auto``; see `exchange`.
        per_node: number of consecutive ranks whose updates are averaged first, before Adasum
            combines those of nodes. The learning rate is then that of one node, not of one worker.
        per_layer: whether to compute separate weights per parameter, or treat all parameters as
            one vector.
        timeout_s: time limit of one communication.
        patience_s: time limit, after a failure, for every rank to report that it is alive.

    Raises:
        InvalidArgumentError: an argument is not one of these, or parameters cannot be combined.
        UsageError: no process group is initialised, or the optimizer already communicates.
        CommunicationError: ranks disagree on settings, shapes, or weights. From `step`: a rank
            exited, hung, or made a different call.

    Source: Maleki et al., MLSys 2021, 2006.02924.
    """

    slipstream_exchanges = "is an AdasumOptimizer"

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: Any = None, *, algorithm: str = "auto",
        per_node: int = 1, per_layer: bool = True, timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        need_optimizer(optimizer)
        need_processes("AdasumOptimizer")
        size = dist.get_world_size(group)
        check_algorithm(algorithm, size, per_node)
        super().__init__(optimizer)
        self.algorithm, self.per_node, self.per_layer = algorithm, per_node, per_layer
        self.skipped = 0
        """Number of steps skipped because a gradient was not finite."""
        self._ranks = ProcessGroup(group, timeout_s, patience_s, "adasum")
        self._wire = self._ranks.wire
        self._parts = self._make_parts()
        shapes = [f"{p.dtype} {list(p.shape)}" for p in self._all()]
        self._ranks.agree(f"{algorithm} {per_node} {per_layer}", "setting of AdasumOptimizer")
        self._ranks.agree(", ".join(shapes), "list of parameters")
        self._ranks.agree(fingerprint(self._all()), "start")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every worker's optimizer, combine the updates, and return the closure's loss."""
        loss = loss_of(closure)
        with torch.no_grad():
            self._unscale(self._all())
            finite = self._all_finite(self._finite())
            if not (finite and (self._step_gradients() if self._stateless() else self._step())):
                self.skipped += 1
        return loss

    def _step(self) -> bool:
        flats = [part.flat(list(part.parameters)) for part in self._parts]
        self.optimizer.step()
        for part, flat in zip(self._parts, flats, strict=True):
            part.undo(flat)
        # From here on the weights never contain this worker's own update, which differs by rank.
        done = all(map(self._exchange, self._parts, flats))
        if done:
            for part, flat in zip(self._parts, flats, strict=True):
                part.add(flat)
        return done

    def _step_gradients(self) -> bool:
        """Combine gradients in place, for optimizers with updates proportional to them."""
        for part in self._parts:
            flat = part.flat([p.grad for p in part.parameters])
            if not self._exchange(part, flat):
                return False
            for parameter, view in zip(part.parameters, part.views(flat), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(view)
        self.optimizer.step()
        return True

    def _exchange(self, part: _Part, flat: torch.Tensor) -> bool:
        """Combine all workers' buffers of a part; return whether they are finite, on all ranks."""
        starts = part.starts if self.per_layer else part.starts[[0, -1]]
        with self._ranks.named_errors(_WHERE):
            return exchange(flat, starts, self._wire, self.algorithm, self.per_node)

    def _all_finite(self, finite: bool) -> bool:
        """Whether all workers' gradients are finite; called before any optimizer state changes."""
        flag = torch.tensor([finite], dtype=torch.uint8)
        with self._ranks.named_errors(_WHERE):
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._wire.group)
        return bool(flag.item())

    def _finite(self) -> bool:
        """Whether this worker's gradients are finite, as found by a GradScaler if one calls."""
        overflow = getattr(self, "found_inf", None)
        if overflow is not None:
            return not bool(overflow.item())
        gradients = [p.grad for p in self._all() if p.grad is not None]
        values = [grad._values() if grad.is_sparse else grad for grad in gradients]
        return all(bool(value.isfinite().all()) for value in values)

    def _stateless(self) -> bool:
        """Whether an update is the gradient times the learning rate, in every group."""
        return (
            type(self.optimizer) is torch.optim.SGD
            and all(g["momentum"] == 0 and g["weight_decay"] == 0 for g in self.param_groups)
            and all(p.grad is None or p.grad.layout == torch.strided for p in self._all())
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this worker's optimizer, which differs by rank: save every rank's."""
        position = {"rank": self._wire.rank, "size": self._wire.size, "skipped": self.skipped}
        return {**self.optimizer.state_dict(), _KEY: position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this worker's own `state_dict`.

        Raises:
            InvalidArgumentError: it is from another worker, another number of workers, or another
                optimizer.
        """
        saved = state_dict.get(_KEY)
        position = (self._wire.rank, self._wire.size)
        if saved is None or (saved["rank"], saved["size"]) != position:
            origin = (
                "not from an AdasumOptimizer" if saved is None
                else f"from rank {saved['rank']} of {saved['size']}"
            )  # fmt: skip
            raise InvalidArgumentError(
                "state_dict", f"it is {origin}; this is rank {position[0]} of {position[1]}",
                remedy="save and load one file per rank, with the same number of ranks",
            )  # fmt: skip
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != _KEY})
        self.skipped = saved["skipped"]
        self._share()

    def _all(self) -> list[torch.Tensor]:
        return [parameter for part in self._parts for parameter in part.parameters]

    def _make_parts(self) -> list[_Part]:
        """Group parameters by dtype and, if weighed per layer, by `_PART_BYTES`."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters_of(self.optimizer):
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        parts: list[_Part] = []
        for parameters in by_dtype.values():
            ends = np.cumsum([p.numel() * p.element_size() for p in parameters])
            indices = (ends - 1) // _PART_BYTES if self.per_layer else np.zeros_like(ends)
            for number in np.unique(indices):
                members = [p for p, k in zip(parameters, indices, strict=True) if k == number]
                parts.append(_Part(members, np.cumsum([0, *(p.numel() for p in members)])))
        return parts


def average_buffers(module: torch.nn.Module, group: Any = None) -> None:
    """Average floating-point buffers, such as running statistics, over all workers.

    Args:
        module: a module with the same buffers on all ranks, contiguous on CPU.
        group: process group; None for the default group.

    Raises:
        UsageError: no process group is initialised.
        CommunicationError: on every rank: ranks disagree on the buffers, and no data was exchanged;
            or one exited or hung (after 25 s at most).
    """
    ranks = process_group(group)
    named = {n: b for n, b in module.named_buffers() if b.is_floating_point()}
    shapes = ", ".join(f"{name} {b.dtype} {list(b.shape)}" for name, b in named.items())
    ranks.need_same_call("average_buffers", torch.zeros(0), shapes)
    ranks.run(
        "average_buffers",
        lambda: [dist.all_reduce(b, group=ranks.wire.group) for b in named.values()],
    )
    for buffer in named.values():
        buffer.div_(ranks.wire.size)
