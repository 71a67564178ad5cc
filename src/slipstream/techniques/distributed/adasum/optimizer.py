"""`AdasumOptimizer`: every worker's own update, combined by Adasum, one line around an optimizer.

Each worker steps its optimizer with its own gradients, so that momentum and the like see what they
would see alone; what the step changed in the weights is combined, layer by layer. Where an update
is the gradient times the learning rate (SGD without momentum and decay), gradients are combined
instead, which is the same and needs no copy of the weights.
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
# Parameters are exchanged in parts of so many bytes, as buckets of DDP: what an exchange takes
# besides is one part's, not the model's.
_PART_BYTES = 25 << 20


@dataclass
class _Part:
    """Some parameters of one dtype, and where they are in a flat buffer."""

    parameters: list[torch.Tensor]
    starts: Any

    @property
    def numel(self) -> int:
        return int(self.starts[-1])

    def flat(self, tensors: list[torch.Tensor | None]) -> torch.Tensor:
        """A buffer with the tensors' numbers; zero where there is none."""
        buffer = torch.zeros(self.numel, dtype=self.parameters[0].dtype)
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        return buffer

    def undo(self, flat: torch.Tensor) -> None:
        """Set the parameters back to a buffer's numbers, and the buffer to what had changed."""
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
    """An optimizer whose updates are combined over workers, instead of gradients averaged.

    The model is the plain one, not in ``DistributedDataParallel``; all ranks start from the same
    weights (see the errors) and stay equal to the bit. The learning rate is the one of a single
    worker. The state of the optimizer differs between workers: each saves its own.

    Order, where these are used: gradients of all micro-batches are accumulated, unscaled by a
    ``GradScaler``, clipped, each worker its own; then `step`. A worker whose gradients are not
    finite makes all skip the step. Buffers, such as those of batch norms, are not updates: average
    them with `average_buffers`.

    Args:
        optimizer: any; its parameters on a processor, dense.
        group: the processes; None: all.
        algorithm: ``gram``, ``rvh`` or ``auto``; see `exchange`.
        per_node: neighbours in rank, ranks of a node, whose updates are averaged first; Adasum
            combines those of nodes. The learning rate then is one node's, not one worker's.
        per_layer: weigh every parameter by itself; False takes all as one vector.
        timeout_s: how long a rank waits for the others in one communication.
        patience_s: how long, after a failure, all are given to say that they live.

    Raises:
        InvalidArgumentError: an argument that is none of these, or parameters that cannot be
            combined.
        UsageError: no process group is initialised, or the optimizer exchanges something already.
        CommunicationError: ranks disagree on settings, shapes, or weights. From `step`: a rank
            ended, hung, or does something else than the others.

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
        """Steps that were skipped because of gradients that were not finite."""
        self._ranks = ProcessGroup(group, timeout_s, patience_s, "adasum")
        self._wire = self._ranks.wire
        self._parts = self._made_parts()
        shapes = [f"{p.dtype} {list(p.shape)}" for p in self._all()]
        self._ranks.agree(f"{algorithm} {per_node} {per_layer}", "setting of AdasumOptimizer")
        self._ranks.agree(", ".join(shapes), "list of parameters")
        self._ranks.agree(fingerprint(self._all()), "start")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every worker's optimizer, and their updates combined.

        Returns:
            What the closure returns.
        """
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
        # From here on never what this worker alone made of the weights: that differs.
        done = all(map(self._exchange, self._parts, flats))
        if done:
            for part, flat in zip(self._parts, flats, strict=True):
                part.add(flat)
        return done

    def _step_gradients(self) -> bool:
        """Combine gradients, in place, which the learning rate alone makes updates of."""
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
        """Combine all workers' buffers of a part; all ranks give the same answer."""
        starts = part.starts if self.per_layer else part.starts[[0, -1]]
        with self._ranks.named_errors(_WHERE):
            return exchange(flat, starts, self._wire, self.algorithm, self.per_node)

    def _all_finite(self, finite: bool) -> bool:
        """Whether all workers' gradients are finite: before anybody's state has changed."""
        flag = torch.tensor([finite], dtype=torch.uint8)
        with self._ranks.named_errors(_WHERE):
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._wire.group)
        return bool(flag.item())

    def _finite(self) -> bool:
        """Whether our gradients are finite; a GradScaler, where one calls, has found out."""
        overflow = getattr(self, "found_inf", None)
        if overflow is not None:
            return not bool(overflow.item())
        gradients = [p.grad for p in self._all() if p.grad is not None]
        values = [one._values() if one.is_sparse else one for one in gradients]
        return all(bool(one.isfinite().all()) for one in values)

    def _stateless(self) -> bool:
        """Whether an update is the gradient times the learning rate, in every group."""
        return (
            type(self.optimizer) is torch.optim.SGD
            and all(g["momentum"] == 0 and g["weight_decay"] == 0 for g in self.param_groups)
            and all(p.grad is None or p.grad.layout == torch.strided for p in self._all())
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of this worker's optimizer. It differs from the others': save every rank's."""
        mine = {"rank": self._wire.rank, "size": self._wire.size, "skipped": self.skipped}
        return {**self.optimizer.state_dict(), _KEY: mine}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from this worker's own `state_dict`.

        Raises:
            InvalidArgumentError: it is another worker's, of another number of workers, or of
                another optimizer.
        """
        saved = state_dict.get(_KEY)
        mine = (self._wire.rank, self._wire.size)
        if saved is None or (saved["rank"], saved["size"]) != mine:
            whose = (
                "no worker's of AdasumOptimizer" if saved is None
                else f"that of rank {saved['rank']} of {saved['size']}"
            )  # fmt: skip
            raise InvalidArgumentError(
                "state_dict", f"it is {whose}; this is rank {mine[0]} of {mine[1]}",
                remedy="save and load one file a rank, with as many ranks",
            )  # fmt: skip
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != _KEY})
        self.skipped = saved["skipped"]
        self._share()

    def _all(self) -> list[torch.Tensor]:
        return [parameter for part in self._parts for parameter in part.parameters]

    def _made_parts(self) -> list[_Part]:
        """By dtype; as one vector they stay together."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters_of(self.optimizer):
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        parts: list[_Part] = []
        for parameters in by_dtype.values():
            ends = np.cumsum([p.numel() * p.element_size() for p in parameters])
            of = (ends - 1) // _PART_BYTES if self.per_layer else np.zeros_like(ends)
            for number in np.unique(of):
                members = [p for p, its in zip(parameters, of, strict=True) if its == number]
                parts.append(_Part(members, np.cumsum([0, *(p.numel() for p in members)])))
        return parts


def average_buffers(module: torch.nn.Module, group: Any = None) -> None:
    """Replace floating buffers, such as running statistics, by their means over all workers.

    Args:
        module: alike on all ranks; its floating buffers contiguous on a processor.
        group: the processes; None: all.

    Raises:
        UsageError: no process group is initialised.
        CommunicationError: on every rank: they disagree on the buffers, and nothing was exchanged;
            or one of them ended or hung (after 25 s at most).
    """
    ranks = process_group(group)
    named = [(name, one) for name, one in module.named_buffers() if one.is_floating_point()]
    shapes = ", ".join(f"{name} {one.dtype} {list(one.shape)}" for name, one in named)
    ranks.need_same_call("average_buffers", torch.zeros(0), shapes)
    buffers = [one for _, one in named]
    ranks.run(
        "average_buffers", lambda: [dist.all_reduce(one, group=ranks.wire.group) for one in buffers]
    )
    for buffer in buffers:
        buffer.div_(ranks.wire.size)
