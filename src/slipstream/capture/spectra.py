"""The statistics "spectra" and "grads": singular values of matrices, and gradient statistics.

The cost of singular values is bounded. Gradients (magnitude, noise, concentration) are read just
before an optimizer uses them: clipped, unscaled, accumulated.

Sources: Halko, Martinsson and Tropp, "Finding Structure with Randomness", SIAM Review 2011, for
matrices too large for all of their singular values; McCandlish et al., "An Empirical Model of
Large-Batch Training", 2018, for the noise scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slipstream.capture.modules import ROOT
from slipstream.graph import GradientNoise, Spectrum

if TYPE_CHECKING:
    import torch

# Limits of computing all singular values, which then take a second or two on one core.
_MAX_SIDE = 2048
_MAX_MULTIPLICATIONS = 1 << 34
_CHUNK = 1 << 22
_MAX_VALUES, _MIN_VALUES, _OVERSAMPLED, _PASSES = 256, 16, 10, 4
_MIN_DIMENSIONS = 2
_SEED = 0


def matrices(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield name and parameter of those that are matrices of first dimension x rest."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= _MIN_DIMENSIONS and parameter.is_floating_point():
            rows = parameter.shape[0]
            if min(rows, parameter.numel() // max(rows, 1)) >= _MIN_DIMENSIONS:
                yield f"{ROOT}.{name}", parameter


def spectrum(name: str, tensor: Any, of: Literal["weight", "gradient"]) -> Spectrum | None:
    """Return singular values of `tensor` as first dimension x rest; None if it is not finite.

    Args:
        tensor: Dense floating-point tensor of any dtype.
    """
    import torch

    with torch.no_grad():
        matrix = tensor.detach().reshape(tensor.shape[0], -1)
        rows, columns = matrix.shape
        norm = float(torch.linalg.vector_norm(matrix, dtype=torch.float64))
        if norm != norm or norm == float("inf"):
            return None
        tall = matrix if rows >= columns else matrix.t()
        side = min(rows, columns)
        exact = side <= _MAX_SIDE and side * matrix.numel() <= _MAX_MULTIPLICATIONS
        singular = _by_gram(tall) if exact else _by_projection(tall)
    # Seven digits, the precision of float32.
    values = tuple(float(f"{value:.7g}") for value in singular.tolist())
    return Spectrum(name, of, rows, columns, float(f"{norm:.9g}"), values, exact)


def _by_gram(tall: Any) -> Any:
    """Return all singular values, from the eigenvalues of ``tall^T tall`` in double precision."""
    import torch

    side = tall.shape[1]
    gram = torch.zeros(side, side, dtype=torch.float64, device=tall.device)
    for part in tall.split(max(_CHUNK // side, 1)):
        wide = part.double()
        gram += wide.t() @ wide
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flip(0)


def _by_projection(tall: Any) -> Any:
    """Return the largest singular values, from the range of ``tall (tall^T tall) x``, x random."""
    import torch

    affordable = _MAX_MULTIPLICATIONS // (_PASSES * tall.numel())
    count = max(min(_MAX_VALUES, affordable), _MIN_VALUES)
    random = torch.Generator(tall.device).manual_seed(_SEED)
    matrix = tall.float()
    start = torch.randn(matrix.shape[1], count + _OVERSAMPLED, generator=random, device=tall.device)
    basis = torch.linalg.qr(matrix @ start).Q
    basis = torch.linalg.qr(matrix.t() @ basis).Q
    basis = torch.linalg.qr(matrix @ basis).Q
    return torch.linalg.svdvals(basis.t() @ matrix)[:count]


_TOP = 0.01


@dataclass
class _Sums:
    """Sums over the steps so far for one parameter."""

    elements: int
    total: Any
    steps: int = 0
    norms: float = 0.0
    squares: float = 0.0
    zeros: float = 0.0
    top_energy: float = 0.0
    energies: int = 0


class Gradients:
    """Context manager that reads gradients before each optimizer step.

    Stores a running sum of every gradient in float32, as large as the parameters.
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

        self._hook = register_optimizer_step_pre_hook(self._read_gradients)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def noise(self) -> tuple[GradientNoise, ...]:
        """Return gradient statistics, in the order of the optimizer's parameters."""
        return tuple(_summary(name, sums) for name, sums in self._sums.items())

    def spectra(self) -> tuple[Spectrum, ...]:
        """Return the spectra of gradients that are matrices, in the last step."""
        return tuple(self._found.values())

    def _read_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
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
                        of_gradient = spectrum(name, gradient, "gradient")
                        if of_gradient is not None:
                            self._found[name] = of_gradient

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
