"""The statistic "spectra": singular values of matrices, at a cost that is bounded.

Source: Halko, Martinsson and Tropp, "Finding Structure with Randomness", SIAM Review 2011, for
matrices too large for all of their singular values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from slipstream.capture.modules import ROOT
from slipstream.graph import Spectrum

if TYPE_CHECKING:
    import torch

# Beyond, not all values are computed: a second or two on one core.
_LARGEST_SIDE = 2048
_MOST_PRODUCTS = 1 << 34
_CHUNK = 1 << 22
_MOST_VALUES, _FEWEST_VALUES, _OVERSAMPLED, _PASSES = 256, 16, 10, 4
_FEWEST_DIMENSIONS = 2
_SEED = 0


def matrices(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that are matrices when written as first dimension x rest, by name."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= _FEWEST_DIMENSIONS and parameter.is_floating_point():
            rows = parameter.shape[0]
            if min(rows, parameter.numel() // max(rows, 1)) >= _FEWEST_DIMENSIONS:
                yield f"{ROOT}.{name}", parameter


def spectrum(name: str, tensor: Any, of: Literal["weight", "gradient"]) -> Spectrum | None:
    """Singular values of `tensor` as first dimension x rest; None where a number is not finite.

    Args:
        tensor: dense, of floating point, in any dtype.
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
        exact = side <= _LARGEST_SIDE and side * matrix.numel() <= _MOST_PRODUCTS
        found = _by_gram(tall) if exact else _by_projection(tall)
    # Seven digits: all that numbers of 32 bits can tell.
    values = tuple(float(f"{value:.7g}") for value in found.tolist())
    return Spectrum(name, of, rows, columns, float(f"{norm:.9g}"), values, exact)


def _by_gram(tall: Any) -> Any:
    """All singular values: roots of the eigenvalues of ``tall^T tall``, in double precision."""
    import torch

    side = tall.shape[1]
    gram = torch.zeros(side, side, dtype=torch.float64, device=tall.device)
    for part in tall.split(max(_CHUNK // side, 1)):
        wide = part.double()
        gram += wide.t() @ wide
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flip(0)


def _by_projection(tall: Any) -> Any:
    """The largest singular values, from the range of ``tall (tall^T tall) x`` for random x."""
    import torch

    affordable = _MOST_PRODUCTS // (_PASSES * tall.numel())
    wanted = max(min(_MOST_VALUES, affordable), _FEWEST_VALUES)
    random = torch.Generator(tall.device).manual_seed(_SEED)
    matrix = tall.float()
    start = torch.randn(
        matrix.shape[1], wanted + _OVERSAMPLED, generator=random, device=tall.device
    )
    basis = torch.linalg.qr(matrix @ start).Q
    basis = torch.linalg.qr(matrix.t() @ basis).Q
    basis = torch.linalg.qr(matrix @ basis).Q
    return torch.linalg.svdvals(basis.t() @ matrix)[:wanted]
