"""Simulate int8 inference of a float model, with gradients.

Weights have one grid per layer, after the following batch norm is folded into them, as in
runtimes; inputs have one grid per layer. Gradients pass the rounding unchanged.

Sources: Jacob et al., arXiv 1712.05877 (folding, section 3.2); Bengio et al. 2013 for the gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from slipstream.quant import (
    Calibration,
    Format,
    MinMax,
    Range,
    calibrate,
    fake_quantize,
    grid_of_range,
    grid_of_weights,
)
from slipstream.quant.calibration import has_weight

_WEIGHTS, _INPUTS = Format(8, signed=True, narrow=True), Format(8)
_Norm = nn.modules.batchnorm._BatchNorm
Norms = dict[nn.Module, _Norm]
_MIN_FACTOR, _BATCH = 1e-6, 64


def following_norms(model: nn.Module, sample: Tensor) -> Norms:
    """Return, by layer, the batch norm that reads its output, from a sample [1, ...]."""
    outputs: dict[int, tuple[nn.Module, Tensor]] = {}
    following: Norms = {}
    layers = [layer for name, layer in model.named_modules() if has_weight(name, layer)]

    def layer_ran(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs[id(output)] = module, output  # holding the tensor keeps its id unique

    def norm_reads(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if id(inputs[0]) in outputs:
            following[outputs[id(inputs[0])][0]] = module  # type: ignore[assignment]

    hooks = [layer.register_forward_hook(layer_ran) for layer in layers]
    hooks += [module.register_forward_pre_hook(norm_reads)
              for module in model.modules() if isinstance(module, _Norm)]  # fmt: skip
    mode = model.training
    try:
        with torch.no_grad():
            model.eval()(sample)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(mode)
    return following


@contextlib.contextmanager
def as_int8(
    model: nn.Module, norms: Norms, ranges: Calibration | None = None, *, share: float = 1.0
) -> Iterator[None]:
    """Let `model` compute the last `share` of every batch as int8 within the block.

    Args:
        norms: from `following_norms`.
        ranges: of layer inputs, from `ranges_of`; None uses those of each batch.
        share: 0.5 if scenes are followed by their twins.
    """
    inside = False

    def forward_of(name: str, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        plain = layer.forward

        def forward(x: Tensor) -> Tensor:
            nonlocal inside
            if inside:
                return plain(x)  # type: ignore[no-any-return]
            floats = round(len(x) * (1 - share))
            parts = [plain(x[:floats])] if floats else []
            seen = None if ranges is None else ranges[name]
            weight, read = _rounded(layer, x[floats:], norms.get(layer), seen)
            inside = True
            try:
                parts.append(functional_call(layer, {"weight": weight}, (read,)))
            finally:
                inside = False
            return torch.cat(parts)

        return forward

    layers = [(name, layer) for name, layer in model.named_modules() if has_weight(name, layer)]
    for name, layer in layers:
        layer.forward = forward_of(name, layer)
    try:
        yield
    finally:
        for _, layer in layers:
            del layer.forward


def ranges_of(model: nn.Module, samples: Tensor) -> Calibration:
    """Return the range of each layer's input over samples [N, ...]."""
    return calibrate(model, samples.split(_BATCH), observer=MinMax)


def _rounded(
    layer: nn.Module, x: Tensor, norm: _Norm | None, seen: Range | None
) -> tuple[Tensor, Tensor]:
    """Return a layer's weight and input, rounded to int8."""
    weight, factor = layer.weight, torch.ones(())
    assert isinstance(weight, Tensor)
    if norm is not None:
        assert norm.running_var is not None
        # Bounded below: dividing by a factor of 0 could not restore the weight.
        factor = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach()
        factor = torch.where(factor.abs() < _MIN_FACTOR, _MIN_FACTOR, factor)
        factor = factor.view(-1, *[1] * (weight.dim() - 1))
    folded = weight * factor
    weight = fake_quantize(folded, grid_of_weights(folded.detach(), _WEIGHTS)) / factor
    values = x.detach()
    grid = (
        grid_of_range(values.min(), values.max(), _INPUTS) if seen is None else seen.grid(_INPUTS)
    )
    return weight, fake_quantize(x, grid)
