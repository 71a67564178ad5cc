"""Check that two expressions compute the same, by running both on fresh inputs.

Inputs have several shapes, with axes of size 1, and normal, large, tiny, zero, equal, negative and
partly infinite values. Where the pattern's value in float64 is finite, the replacement may differ
from it by a few times the pattern's own rounding error in the dtype of use: the error of a run in
that dtype, and those of float64 runs in which every operand is rounded at random. Where
the pattern overflows in the dtype of use, a replacement that does not is accepted. Gradients are
compared in the same way, and whether the result shares memory with an input.

Source of the random rounding: Vignes, "A stochastic arithmetic for reliable scientific
computation", Mathematics and Computers in Simulation 35, 1993.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from slipstream.graph import TensorSpec
from slipstream.techniques.rewrite.expression import Expression
from slipstream.techniques.rewrite.regions import sizes_of

CHECKS = 256
"""Number of fresh inputs."""
MIN_SHAPES = 5
_ERROR_RATIO = 4.0
# Multiples of the pattern's random rounding errors, in values and in gradients. The gradient of
# layer_norm subtracts numbers that are larger than those of its formula.
_SPREADS = 16.0, 256.0
_ULPS = 4.0
_MAX_NOISY = 8
_BACKWARD_NOISE = 1 / 16
_REGIMES: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "normal": lambda x, g: x,
    "large": lambda x, g: x * 1e3,
    "tiny": lambda x, g: x * 1e-3,
    "zeros": lambda x, g: torch.where(torch.rand(x.shape, generator=g) < 0.5, 0.0, x),
    "equal": lambda x, g: torch.full_like(x, float(torch.randn((), generator=g))),
    "negative": lambda x, g: -x.abs() - 0.1,
    "infinite": lambda x, g: torch.where(torch.rand(x.shape, generator=g) < 0.1, -torch.inf, x),
    "mixed": lambda x, g: x * torch.exp(3 * torch.randn(x.shape, dtype=x.dtype, generator=g)),
}


def resized(specs: Sequence[TensorSpec], sizes: Mapping[int, int]) -> list[TensorSpec]:
    """Return inputs with other extents."""
    return [spec.resized([sizes.get(extent, extent) for extent in spec.shape]) for spec in specs]


def inputs_for(
    specs: Sequence[TensorSpec], regime: str, generator: torch.Generator
) -> list[torch.Tensor]:
    """Return random inputs: float64 for floating dtypes; integers below the last extent."""
    classes = next((s.shape[-1] for s in specs if s.shape and "float" in s.dtype), 1)
    tensors = []
    for spec in specs:
        if spec.dtype == "bool":
            tensors.append(torch.rand(spec.shape, generator=generator) < 0.5)
        elif "float" not in spec.dtype:
            tensors.append(torch.randint(0, classes, spec.shape, generator=generator))
        else:
            x = torch.randn(spec.shape, dtype=torch.float64, generator=generator)
            tensors.append(_REGIMES[regime](x, generator))
    return tensors


def why_different(
    pattern: Expression,
    replacement: Expression,
    specs: Sequence[TensorSpec],
    *,
    gradients: bool = True,
) -> str | None:
    """Return how the replacement differs from the pattern; None if no difference was found.

    Args:
        specs: the pattern's inputs where it was found; their dtypes are those of use.
        gradients: whether gradients of the floating inputs must be equal, too.
    """
    if gradients and any(spec.dtype in ("bfloat16", "float16") for spec in specs):
        wide = [s.as_dtype("float32") if "float" in s.dtype else s for s in specs]
        reason = why_different(pattern, replacement, wide)
        # In 16 bits a tolerance that covers gradients' errors would cover anything.
        return reason or why_different(pattern, replacement, specs, gradients=False)
    generator = torch.Generator().manual_seed(0)
    shapes: set[tuple[tuple[int, ...], ...]] = set()
    checked = 0
    usual: list[float] = []
    trials = itertools.cycle(itertools.product(sizes_of(pattern, specs), _REGIMES))
    for sizes, regime in itertools.islice(trials, 4 * CHECKS):
        changed = resized(specs, sizes)
        exact = inputs_for(changed, regime, generator)
        used = [
            x.to(getattr(torch, spec.dtype)) if x.is_floating_point() else x
            for x, spec in zip(exact, changed, strict=True)
        ]
        # Inputs that the dtype of use can represent.
        exact = [x.double() if x.is_floating_point() else x for x in used]
        try:
            reference = _passes(pattern, exact, sizes, gradients)
            rounded = _passes(pattern, used, sizes, gradients)
        except (RuntimeError, IndexError, ValueError):
            continue
        try:
            actual = _passes(replacement, used, sizes, gradients)
        except (RuntimeError, IndexError, ValueError) as error:
            return f"it fails for inputs of shapes {[s.shape for s in changed]}: {error}"
        shapes.add(tuple(spec.shape for spec in changed))
        eps = max(torch.finfo(x.dtype).eps for x in used if x.is_floating_point())
        # Gradients that vanish, as those of a saturated softmax, are as precise as usual ones.
        usual = usual or [_largest(x[x.isfinite()]) for x in reference]
        noisy: list[list[torch.Tensor]] = []
        reason = _compare(reference, rounded, noisy, actual, usual)
        while reason is not None and len(noisy) < _MAX_NOISY:
            forward, back = (eps, 0.0) if len(noisy) % 2 == 0 else (0.0, _BACKWARD_NOISE)
            noise = partial(_noise, forward, back, generator)
            made = _passes(pattern, exact, sizes, gradients, noise)
            scale = eps / (forward or back)
            noisy.append([(x - y) * scale for x, y in zip(made, reference, strict=True)])
            reason = _compare(reference, rounded, noisy, actual, usual)
        if reason is not None:
            return f"{reason}, for {regime} inputs of shapes {[s.shape for s in changed]}"
        if _shares(pattern, used, sizes) != _shares(replacement, used, sizes):
            return "only one of them returns a view of its input"
        checked += 1
        if checked >= CHECKS and len(shapes) >= MIN_SHAPES:
            return None
    return f"only {len(shapes)} shapes could be checked"


def _passes(
    expression: Expression,
    inputs: Sequence[torch.Tensor],
    sizes: Mapping[int, int],
    gradients: bool,
    noise: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Return the value and the gradients of the floating inputs, for a fixed output gradient."""
    if not gradients:
        with torch.no_grad():
            return [expression.run(inputs, sizes, noise)]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        value = expression.run(leaves, sizes, noise)
        sources = [leaf for leaf in leaves if leaf.requires_grad]
        if not value.requires_grad:
            return [value, *(torch.zeros_like(leaf) for leaf in sources)]
        weights = torch.arange(value.numel(), dtype=value.dtype).reshape(value.shape)
        back = torch.autograd.grad(
            value, sources, torch.cos(weights), allow_unused=True, materialize_grads=True
        )
    return [value.detach(), *back]


def _compare(
    reference: Sequence[torch.Tensor],
    rounded: Sequence[torch.Tensor],
    noisy: Sequence[Sequence[torch.Tensor]],
    actual: Sequence[torch.Tensor],
    usual: Sequence[float],
) -> str | None:
    rows = zip(reference, rounded, actual, strict=True)
    for n, (exact, ours, theirs) in enumerate(rows):
        what = "the value" if n == 0 else f"the gradient of input {n}"
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"{what} has another shape or dtype"
        if not ours.is_floating_point():
            if not torch.equal(ours, theirs):
                return f"{what} differs"
            continue
        finite = exact.isfinite()
        # Where the value itself is not finite, its gradient is not defined either.
        defined = finite & (reference[0].isfinite().all() if n else True)
        same = ours.isfinite() & defined
        if not theirs[same].isfinite().all():
            return f"{what} overflows"
        both = defined & theirs.isfinite()
        scale = _largest(exact[finite])
        error = _largest((ours.double() - exact)[same])
        spread = max((_largest(run[n][defined & run[n].isfinite()]) for run in noisy), default=0.0)
        tolerance = _ERROR_RATIO * error + _SPREADS[n > 0] * spread
        tolerance += _ULPS * torch.finfo(ours.dtype).eps * max(scale, 16 * usual[n] if n else 0.0)
        tolerance += torch.finfo(ours.dtype).tiny
        off = _largest((theirs.double() - exact)[both])
        if off > tolerance:
            return f"{what} differs by {off:.3g} at values up to {scale:.3g}"
    return None


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _noise(
    forward: float, back: float, generator: torch.Generator, value: torch.Tensor
) -> torch.Tensor:
    """Return the value and its gradient with random relative errors below `forward` and `back`.

    With the same error in both, gradients that cancel would still cancel exactly. Gradients are
    linear in their errors, which may thus be large, to show what cancels twice.
    """
    if not value.is_floating_point():
        return value

    def shaken(x: torch.Tensor, by: float) -> torch.Tensor:
        unit = torch.rand(x.shape, dtype=torch.float64, generator=generator)
        return x * (1 + by * (2 * unit - 1))

    made = shaken(value, forward) if forward else value.view_as(value)
    if back and made.requires_grad:
        made.register_hook(lambda gradient: shaken(gradient, back))
    return made


def _shares(
    expression: Expression, inputs: Sequence[torch.Tensor], sizes: Mapping[int, int]
) -> list[bool]:
    """Return for each input whether the result is in its memory."""
    with torch.no_grad():
        memory = expression.run(inputs, sizes).untyped_storage().data_ptr()
    return [x.untyped_storage().data_ptr() == memory for x in inputs]
