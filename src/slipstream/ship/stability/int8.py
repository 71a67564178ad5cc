"""A float model that computes as its int8 copy on a device does, with gradients.

Weights have one grid a layer, after the batch norm behind it is folded into them, as runtimes fold
it; what a layer reads has one grid, of the range it has. Gradients pass the rounding unchanged.

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

_WEIGHTS, _READ = Format(8, signed=True, narrow=True), Format(8)
_Norm = nn.modules.batchnorm._BatchNorm
Norms = dict[nn.Module, _Norm]
_LEAST, _BATCH = 1e-6, 64


def norms_behind(model: nn.Module, sample: Tensor) -> Norms:
    """The batch norm that reads nothing but a layer's output, by layer.

    Args:
        sample: what the model reads, [1, ...].
    """
    outputs: dict[int, tuple[nn.Module, Tensor]] = {}
    behind: Norms = {}
    layers = [one for name, one in model.named_modules() if has_weight(name, one)]

    def layer_ran(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs[id(output)] = module, output  # the tensor is held, so that no other has its id

    def norm_reads(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if id(inputs[0]) in outputs:
            behind[outputs[id(inputs[0])][0]] = module  # type: ignore[assignment]

    hooks = [one.register_forward_hook(layer_ran) for one in layers]
    hooks += [one.register_forward_pre_hook(norm_reads)
              for one in model.modules() if isinstance(one, _Norm)]  # fmt: skip
    mode = model.training
    try:
        with torch.no_grad():
            model.eval()(sample)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(mode)
    return behind


@contextlib.contextmanager
def as_int8(
    model: nn.Module, norms: Norms, ranges: Calibration | None = None, *, share: float = 1.0
) -> Iterator[None]:
    """While it lasts, `model` computes the last `share` of every batch as int8 does.

    Args:
        norms: as `norms_behind` gives them.
        ranges: of what layers read, as `ranges_of` gives them; None for each batch's own.
        share: a half where scenes are followed by their twins.
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

    layers = [(name, one) for name, one in model.named_modules() if has_weight(name, one)]
    for name, one in layers:
        one.forward = forward_of(name, one)
    try:
        yield
    finally:
        for _, one in layers:
            del one.forward


def ranges_of(model: nn.Module, samples: Tensor) -> Calibration:
    """What the layers of `model` read of some samples [N, ...], from the least to the largest."""
    return calibrate(model, samples.split(_BATCH), observer=MinMax)


def _rounded(
    layer: nn.Module, x: Tensor, norm: _Norm | None, seen: Range | None
) -> tuple[Tensor, Tensor]:
    """Weight and input of a layer as their codes have them."""
    weight, factor = layer.weight, torch.ones(())
    assert isinstance(weight, Tensor)
    if norm is not None:
        assert norm.running_var is not None
        # At least a little: a channel that the norm switches off has no weight to restore.
        factor = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach()
        factor = torch.where(factor.abs() < _LEAST, _LEAST, factor)
        factor = factor.view(-1, *[1] * (weight.dim() - 1))
    folded = weight * factor
    weight = fake_quantize(folded, grid_of_weights(folded.detach(), _WEIGHTS)) / factor
    given = x.detach()
    grid = grid_of_range(given.min(), given.max(), _READ) if seen is None else seen.grid(_READ)
    return weight, fake_quantize(x, grid)
