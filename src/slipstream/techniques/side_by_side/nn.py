"""Linear layers whose gradients' products have the optimizer's step of another layer beside them.

Backward, a layer's weight is done with once its gradient is complete. Its update waits for memory;
the products of the layer before it compute. They run as one loop, and ``optimizer.step()`` updates
what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slipstream.errors import SlipstreamError
from slipstream.techniques.side_by_side.kernels import alone, fits, interleave, product
from slipstream.techniques.side_by_side.updates import Update, fits_update, form

Pays = Callable[[str, int, int, int, bool, int, int], bool]
"""Whether a pair is faster in one loop: optimizer's class, rows, outputs and inputs of the layer,
whether the gradient of its input is wanted, how many numbers are updated, of how many."""


def able(rows: int, outputs: int, inputs: int) -> bool:
    """Whether a layer's gradients are products without a rest."""
    return fits(inputs, rows) and fits(inputs, outputs)


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor, wants_input: bool, update: Update | None
) -> tuple[Tensor | None, Tensor]:
    """Gradients of a linear layer's input and weight, `update` beside their products.

    Args:
        dy: float32 [rows, outputs]; x: [rows, inputs]; weight: [outputs, inputs]; see `able`.
        wants_input: whether that of the input is wanted.
    """
    dw = torch.empty_like(weight)
    products = [product(dy.t(), x.t(), None, dw)]
    dx = torch.empty_like(x) if wants_input else None
    if dx is not None:
        products.append(product(dy, weight.t(), None, dx))
    count = update.count if update is not None else 0
    ends = [count * n // len(products) // 16 * 16 for n in range(len(products))] + [count]
    for one, begin, end in zip(products, ends, ends[1:], strict=False):
        work = alone(one) if update is None else interleave(update.part(begin, end), one)
        work()
    return dx, dw


class Beside:
    """What an optimizer owes in the backward pass, and what it need not do again.

    A copy, or one from a file, owes nothing: layers of a copied model are plain.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | None = None, pays: Pays | None = None
    ) -> None:
        self._optimizer, self._pays = optimizer, pays
        self._groups: dict[int, dict[str, Any]] = {}
        self._owed: list[Tensor] = []
        self._hooks: list[RemovableHandle] = []
        self._layers: list[nn.Linear] = []
        self._took: set[int] = set()
        self._done: list[tuple[Tensor, Tensor | None]] = []
        self._trained = self.pairs = 0
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(lambda *_: self.settle())

    def __reduce__(self) -> tuple[type[Beside], tuple[()]]:
        return Beside, ()

    @property
    def live(self) -> bool:
        """Whether there is an optimizer."""
        return self._optimizer is not None

    def put(self, layer: nn.Linear, trained: bool) -> None:
        """Let a layer run what is owed, and owe its own weight's update where that is `trained`."""
        layer.__class__ = LinearBeside
        cast("LinearBeside", layer).beside = self
        self._layers.append(layer)
        if trained:
            self._hooks.append(layer.weight.register_post_accumulate_grad_hook(self.owe))

    def owe(self, parameter: Tensor) -> None:
        """A parameter's gradient is complete.

        Raises:
            SlipstreamError: it was updated with an earlier gradient already.
        """
        if any(parameter is one for one, _ in self._done):
            raise SlipstreamError(
                "side_by_side: a second backward pass before optimizer.step(), and weights are "
                "updated in the first",
                remedy="leave side_by_side out where gradients are accumulated",
            )
        if all(parameter is not one for one in self._owed):
            self._owed.append(parameter)

    def take(self, rows: int, weight: Tensor, wants_input: bool) -> Update | None:
        """What was owed last, if it pays beside this layer's products."""
        optimizer, pays = self._optimizer, self._pays
        if optimizer is None or not self._owed:
            return None
        parameter = self._owed[-1]
        if not self._groups:
            self._groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
            self._trained = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
        outputs, inputs = weight.shape
        shape = rows, outputs, inputs, wants_input, parameter.numel(), self._trained
        kind = form(type(optimizer).__name__, self._groups[id(parameter)])
        if pays is not None and not pays(kind, *shape):
            return None
        self._owed.pop()
        update = Update(optimizer, self._groups[id(parameter)], parameter)
        self._done.append((parameter, parameter.grad))
        # Whoever kept the weight for a second backward pass is told by autograd.
        torch.autograd.graph.increment_version(parameter)
        self.pairs += 1
        self._took.add(id(weight))
        return update

    def _before_step(self, *_given: object) -> None:
        for parameter, _ in self._done:
            parameter.grad = None

    def settle(self) -> None:
        """After a step: gradients are where they were, and nothing is owed."""
        for parameter, gradient in self._done:
            parameter.grad = gradient
        if self._pays is not None and self._owed:
            self._leave_out()
        self._done, self._owed, self._groups = [], [], {}

    def _leave_out(self) -> None:
        """Layers at which no pair pays are ``nn.Linear`` again, which costs less by itself."""
        for layer in self._layers:
            if id(layer.weight) not in self._took:
                layer.__class__ = nn.Linear
                del layer.beside
        self._layers = []
        if not self._took:
            for hook in self._hooks:
                hook.remove()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, beside: Beside) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.beside = beside
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        db = dy.sum(0) if wants_bias else None
        update = ctx.beside.take(len(x), weight, wants_input) if wants_weight else None
        if update is not None:
            dx, dw = gradients(dy.contiguous(), x, weight, wants_input, update)
            return dx, dw, db, None
        return dy @ weight if wants_input else None, dy.t() @ x if wants_weight else None, db, None


class LinearBeside(nn.Linear):
    """``nn.Linear``, see the module's text; anything unusual goes the way of ``nn.Linear``."""

    beside: Beside

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``."""
        x, weight = input.reshape(-1, input.shape[-1]), self.weight
        usual = (
            self.beside.live and torch.is_grad_enabled() and weight.requires_grad
            and x.dtype is torch.float32 and fits_update(weight) and x.is_cpu
            and able(len(x), *weight.shape) and not torch.is_autocast_enabled("cpu")
        )  # fmt: skip
        if not usual:
            return super().forward(input)
        outputs = cast("Tensor", _Product.apply(x.contiguous(), weight, self.bias, self.beside))
        return outputs.view(*input.shape[:-1], weight.shape[0])


def put_beside(
    layers: Iterable[nn.Linear], optimizer: torch.optim.Optimizer, pays: Pays | None = None
) -> Beside:
    """Let the steps of `optimizer` run beside the gradients' products of `layers`.

    Layers stay the objects they are, with parameters, names and hooks.

    Args:
        pays: asked of every pair; all run as one loop where None.
    """
    beside = Beside(optimizer, pays)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for layer in layers:
        beside.put(layer, id(layer.weight) in trained)
    return beside
