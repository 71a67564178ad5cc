"""Linear layers that interleave their gradients with another layer's optimizer step.

In the backward pass a layer's weight is no longer needed once its gradient is complete. Its update
is memory-bound; the gradients of the preceding layer are compute-bound. Both run in one loop, and
``optimizer.step()`` updates the remaining parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slipstream.errors import SlipstreamError
from slipstream.techniques.side_by_side.kernels import alone, fits, interleave, product
from slipstream.techniques.side_by_side.updates import Update, fits_update, update_kind

IsFaster = Callable[[str, int, int, int, bool, int, int], bool]
"""Whether a pair is faster interleaved, given the kind of update, rows, outputs and inputs of the
layer, whether the gradient of its input is required, the number of updated parameters, and that of
all parameters of the optimizer."""


def has_whole_tiles(rows: int, outputs: int, inputs: int) -> bool:
    """Whether the products of a layer's gradients consist of whole tiles."""
    return fits(inputs, rows) and fits(inputs, outputs)


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor, needs_input: bool, update: Update | None
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of a linear layer's input and weight, interleaved with `update`.

    Args:
        dy: float32 [rows, outputs]; x: [rows, inputs]; weight: [outputs, inputs]; see
            `has_whole_tiles`.
        needs_input: whether the gradient of the input is required.
    """
    dw = torch.empty_like(weight)
    products = [product(dy.t(), x.t(), None, dw)]
    dx = torch.empty_like(x) if needs_input else None
    if dx is not None:
        products.append(product(dy, weight.t(), None, dx))
    count = update.count if update is not None else 0
    ends = [count * n // len(products) // 16 * 16 for n in range(len(products))] + [count]
    for loop, begin, end in zip(products, ends, ends[1:], strict=False):
        run = alone(loop) if update is None else interleave(update.part(begin, end), loop)
        run()
    return dx, dw


class UpdateQueue:
    """Pending updates of a backward pass, and those that ``optimizer.step()`` must skip.

    Copied and unpickled queues have no optimizer: layers of a copied model run as ``nn.Linear``.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | None = None, is_faster: IsFaster | None = None
    ) -> None:
        self._optimizer, self._is_faster = optimizer, is_faster
        self._groups: dict[int, dict[str, Any]] = {}
        self._pending: list[Tensor] = []
        self._hooks: list[RemovableHandle] = []
        self._layers: list[nn.Linear] = []
        self._paired: set[int] = set()
        self._done: list[tuple[Tensor, Tensor | None]] = []
        self._trained = self.pairs = 0
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(lambda *_: self.finish_step())

    def __reduce__(self) -> tuple[type[UpdateQueue], tuple[()]]:
        return UpdateQueue, ()

    @property
    def live(self) -> bool:
        """Whether the queue has an optimizer."""
        return self._optimizer is not None

    def add_layer(self, layer: nn.Linear, trained: bool) -> None:
        """Let a layer run pending updates, and enqueue its weight's update if it is `trained`."""
        layer.__class__ = InterleavedLinear
        cast("InterleavedLinear", layer).updates = self
        self._layers.append(layer)
        if trained:
            self._hooks.append(layer.weight.register_post_accumulate_grad_hook(self.enqueue))

    def enqueue(self, parameter: Tensor) -> None:
        """Enqueue the update of a parameter whose gradient is complete.

        Raises:
            SlipstreamError: the parameter was already updated in this step.
        """
        if any(parameter is updated for updated, _ in self._done):
            raise SlipstreamError(
                "side_by_side: got a second backward pass before optimizer.step(), but the first "
                "already updated weights",
                remedy="do not combine side_by_side with gradient accumulation",
            )
        if all(parameter is not pending for pending in self._pending):
            self._pending.append(parameter)

    def next_update(self, rows: int, weight: Tensor, needs_input: bool) -> Update | None:
        """Return the last pending update if it is faster interleaved with this layer."""
        optimizer, is_faster = self._optimizer, self._is_faster
        if optimizer is None or not self._pending:
            return None
        parameter = self._pending[-1]
        if not self._groups:
            self._groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
            self._trained = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
        outputs, inputs = weight.shape
        shape = rows, outputs, inputs, needs_input, parameter.numel(), self._trained
        kind = update_kind(type(optimizer).__name__, self._groups[id(parameter)])
        if is_faster is not None and not is_faster(kind, *shape):
            return None
        self._pending.pop()
        update = Update(optimizer, self._groups[id(parameter)], parameter)
        self._done.append((parameter, parameter.grad))
        # Autograd reports graphs that saved the old weight for a second backward pass.
        torch.autograd.graph.increment_version(parameter)
        self.pairs += 1
        self._paired.add(id(weight))
        return update

    def _before_step(self, *ignored: object) -> None:
        for parameter, _ in self._done:
            parameter.grad = None

    def finish_step(self) -> None:
        """Restore gradients after a step and clear pending updates."""
        for parameter, gradient in self._done:
            parameter.grad = gradient
        if self._is_faster is not None and self._pending:
            self._restore_layers()
        self._done, self._pending, self._groups = [], [], {}

    def _restore_layers(self) -> None:
        """Turn layers without a faster pair back into ``nn.Linear``, which has less overhead."""
        for layer in self._layers:
            if id(layer.weight) not in self._paired:
                layer.__class__ = nn.Linear
                del layer.updates
        self._layers = []
        if not self._paired:
            for hook in self._hooks:
                hook.remove()


class _InterleavedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, updates: UpdateQueue
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.updates = updates
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        db = dy.sum(0) if needs_bias else None
        update = ctx.updates.next_update(len(x), weight, needs_input) if needs_weight else None
        if update is not None:
            dx, dw = gradients(dy.contiguous(), x, weight, needs_input, update)
            return dx, dw, db, None
        return dy @ weight if needs_input else None, dy.t() @ x if needs_weight else None, db, None


class InterleavedLinear(nn.Linear):
    """``nn.Linear`` with interleaved updates; runs as ``nn.Linear`` on unsupported input."""

    updates: UpdateQueue

    def forward(self, input: Tensor) -> Tensor:
        """Return the same as ``nn.Linear``, with the same arguments."""
        x, weight = input.reshape(-1, input.shape[-1]), self.weight
        supported = (
            self.updates.live and torch.is_grad_enabled() and weight.requires_grad
            and x.dtype is torch.float32 and fits_update(weight) and x.is_cpu
            and has_whole_tiles(len(x), *weight.shape) and not torch.is_autocast_enabled("cpu")
        )  # fmt: skip
        if not supported:
            return super().forward(input)
        outputs = cast(
            "Tensor", _InterleavedProduct.apply(x.contiguous(), weight, self.bias, self.updates)
        )
        return outputs.view(*input.shape[:-1], weight.shape[0])


def interleave_updates(
    layers: Iterable[nn.Linear], optimizer: torch.optim.Optimizer, is_faster: IsFaster | None = None
) -> UpdateQueue:
    """Interleave the steps of `optimizer` with the gradients of `layers`.

    Layers keep their identity, parameters, names and hooks.

    Args:
        is_faster: decides which pairs to interleave; all if None.
    """
    updates = UpdateQueue(optimizer, is_faster)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for layer in layers:
        updates.add_layer(layer, id(layer.weight) in trained)
    return updates
