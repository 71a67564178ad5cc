"""The statistic "grads": how large, how noisy and how concentrated every gradient is.

Gradients are read where an optimizer is about to use them: clipped, unscaled, accumulated.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018 (the noise scale).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.capture.modules import ROOT
from slipstream.capture.spectra import matrices, spectrum
from slipstream.graph import GradientNoise, Spectrum

if TYPE_CHECKING:
    import torch

_TOP = 0.01


@dataclass
class _Sums:
    """Over the steps so far, of one parameter."""

    elements: int
    total: Any
    steps: int = 0
    norms: float = 0.0
    squares: float = 0.0
    zeros: float = 0.0
    top_energy: float = 0.0
    energies: int = 0


class Gradients:
    """Within it, gradients are read before each optimizer step.

    A running sum of every gradient is kept, in float32: as much memory as the parameters.
    """

    def __init__(self, model: torch.nn.Module | None, *, noise: bool, spectra: bool) -> None:
        self._names: dict[int, str] = {}
        self._matrices: dict[int, str] = {}
        if model is not None:
            self._names = {id(p): f"{ROOT}.{name}" for name, p in model.named_parameters()}
            self._matrices = {id(p): name for name, p in matrices(model)}
        self._noise, self._spectra = noise, spectra
        self._sums: dict[str, _Sums] = {}
        self._found: dict[str, Spectrum] = {}
        self._hook: Any = None
        self.last_step = False

    def __enter__(self) -> Gradients:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._hook = register_optimizer_step_pre_hook(self._look)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def noise(self) -> tuple[GradientNoise, ...]:
        """What the gradients were like, in the order of the optimizer's parameters."""
        return tuple(_summary(name, sums) for name, sums in self._sums.items())

    def spectra(self) -> tuple[Spectrum, ...]:
        """Of the gradients that are matrices, in the last step."""
        return tuple(self._found.values())

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        import torch

        with torch.no_grad():
            for g, group in enumerate(optimizer.param_groups):
                for p, parameter in enumerate(group["params"]):
                    gradient = parameter.grad
                    if gradient is None or not gradient.is_floating_point():
                        continue
                    name = self._names.get(id(parameter), f"parameter {p} of group {g}")
                    if gradient.is_sparse:
                        gradient = gradient.to_dense()
                    if self._noise:
                        self._add(name, gradient)
                    if self._spectra and self.last_step and id(parameter) in self._matrices:
                        found = spectrum(name, gradient, "gradient")
                        if found is not None:
                            self._found[name] = found

    def _add(self, name: str, gradient: Any) -> None:
        import torch

        flat = gradient.detach().reshape(-1).float()
        if name not in self._sums:
            self._sums[name] = _Sums(flat.numel(), torch.zeros_like(flat))
        sums = self._sums[name]
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
        if not flat.numel() or norm != norm or norm == float("inf"):
            return  # a step that a loss scaler skips
        sums.total += flat
        sums.steps += 1
        sums.norms += norm
        sums.squares += norm**2
        sums.zeros += 1 - int(torch.count_nonzero(flat)) / flat.numel()
        if norm:
            top = flat.abs().topk(max(round(_TOP * flat.numel()), 1), sorted=False).values
            top_norm = float(torch.linalg.vector_norm(top, dtype=torch.float64))
            sums.top_energy += min((top_norm / norm) ** 2, 1.0)
            sums.energies += 1


def _summary(name: str, sums: _Sums) -> GradientNoise:
    import torch

    steps, elements = max(sums.steps, 1), max(sums.elements, 1)
    mean_square = sums.squares / steps / elements
    variance = None
    if sums.steps > 1:
        total = float(torch.linalg.vector_norm(sums.total, dtype=torch.float64))
        of_mean = (total / steps) ** 2 / elements
        variance = max(mean_square - of_mean, 0.0) * steps / (steps - 1)
    return GradientNoise(
        parameter=name,
        elements=sums.elements,
        steps=sums.steps,
        norm=sums.norms / steps,
        mean_square=mean_square,
        variance=variance,
        zeros=min(sums.zeros / steps, 1.0),
        top_energy=sums.top_energy / max(sums.energies, 1),
    )
