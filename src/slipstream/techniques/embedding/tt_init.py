"""Initialization of a tensor train: cores whose product resembles a normally distributed table.

Products of normal numbers are too often near zero. Entries are therefore drawn from N(0, 1)
conditioned on a minimum magnitude, the threshold at which the fourth moment of the product is that
of a normal distribution. Independent entries of four cores of low rank cannot reach it; then the
slices of the inner cores are random rotations, which preserve norms, so that only the first and the
last core vary them.

Source: the conditioned draw of Yin, Acun, Liu and Wu, "TT-Rec: Tensor Train Compression for Deep
Learning Recommendation Models", MLSys 2021. Scale and threshold are derived here: the published
code's scale omits the ranks, and a table of rank 32 becomes hundreds of times too large.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

MIN_STD = 0.1
"""Minimum initial standard deviation of a train that replaces a table.

Tables of click models start nearer to zero. Core entries of such a small product would be no larger
than the optimizer's first steps, which change every slice and would make all slices similar.
"""

_NO_THRESHOLD, _HIGHEST_THRESHOLD = 0.0, 30.0


def sampled_gaussian(cores: Sequence[torch.Tensor], std: float) -> None:
    """Fill cores, [p, R, q, R'] each, so that the table has this standard deviation."""
    ranks = tuple(core.shape[1] for core in cores[1:])
    threshold, rotated = _threshold(ranks), needs_rotations(ranks)
    scale = (std / math.sqrt(math.prod(ranks))) ** (1 / len(cores))
    unit = 1 / math.sqrt(_moments(threshold)[0])
    with torch.no_grad():
        for place, core in enumerate(cores):
            inner = 0 < place < len(cores) - 1
            numbers = _rotations(core) if rotated and inner else _beyond(threshold, core) * unit
            core.copy_(numbers * scale)


def gaussian(cores: Sequence[torch.Tensor], std: float) -> None:
    """Fill cores like `sampled_gaussian`, but with normal entries; equivalent for high ranks."""
    ranks = [core.shape[1] for core in cores[1:]]
    scale = (std / math.sqrt(math.prod(ranks))) ** (1 / len(cores))
    with torch.no_grad():
        for core in cores:
            core.normal_(std=scale)


@functools.cache
def _threshold(ranks: tuple[int, ...]) -> float:
    """Return the threshold at which the product has the fourth moment of a normal number."""
    excess = rotated_excess_kurtosis if needs_rotations(ranks) else excess_kurtosis
    low, high = _NO_THRESHOLD, _HIGHEST_THRESHOLD
    for _ in range(60):
        middle = (low + high) / 2
        if excess(ranks, _moments(middle)[1]) > 0:
            low = middle
        else:
            high = middle
    return high


def excess_kurtosis(ranks: Sequence[int], kurtosis: float) -> float:
    """Return the excess kurtosis of a product of cores of independent entries with zero mean.

    Args:
        ranks: R_1 to R_(d-1).
        kurtosis: kurtosis of the entries, E x^4 / (E x^2)^2; 3 for normal ones, at least 1.
    """
    # Of a row vector v with as many entries as the rank: E v_i^4 and E v_i^2 v_j^2, entries of the
    # cores having unit variance. One core further, v'_k = sum_i v_i B_ik.
    fourth, mixed = kurtosis, 1.0
    for rank in ranks:
        pairs = rank * (rank - 1) * mixed
        fourth, mixed = rank * fourth * kurtosis + 3 * pairs, rank * fourth + pairs
    return fourth / math.prod(ranks) ** 2 - 3


def rotated_excess_kurtosis(ranks: Sequence[int], kurtosis: float) -> float:
    """Return the excess kurtosis for equal ranks R and random rotations as inner slices.

    A row u with R independent entries is turned to e |u|, e uniform on the sphere, and multiplied
    by a column v of such entries: E |u|^4 E (e v)^4, where E e_i^4 = 3 / (R (R + 2)) and
    E e_i^2 e_j^2 = 1 / (R (R + 2)).
    """
    rank = ranks[0]
    return 3 * (kurtosis + rank - 1) ** 2 / (rank * (rank + 2)) - 3


def needs_rotations(ranks: Sequence[int]) -> bool:
    """Whether no threshold suffices for independent entries; only for equal ranks."""
    return len(set(ranks)) == 1 and len(ranks) > 1 and excess_kurtosis(ranks, 1.0) > 0


def _rotations(like: torch.Tensor) -> torch.Tensor:
    """Return a uniform rotation of mean square 1 per row and column of a core [p, R, q, R].

    Source: Mezzadri, "How to Generate Random Matrices from the Classical Compact Groups", 2007.
    """
    rows, rank, columns, _ = like.shape
    drawn = torch.randn(rows, columns, rank, rank, dtype=torch.float64, device=like.device)
    turned, upper = torch.linalg.qr(drawn)
    turned = turned * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    rotations: torch.Tensor = turned.permute(0, 2, 1, 3) * math.sqrt(rank)
    return rotations


def _moments(threshold: float) -> tuple[float, float]:
    """Return E x^2 and the kurtosis of N(0, 1) beyond the threshold."""
    # Density over tail probability, by erfcx, since both underflow.
    tail = torch.special.erfcx(torch.tensor(threshold / math.sqrt(2), dtype=torch.float64))
    hazard = math.sqrt(2 / math.pi) / float(tail)
    second = 1 + threshold * hazard
    return second, (threshold**3 * hazard + 3 * second) / second**2


def _beyond(threshold: float, like: torch.Tensor) -> torch.Tensor:
    """Return normal numbers of at least this magnitude, with random signs."""
    share = math.erfc(threshold / math.sqrt(2)) / 2
    drawn = torch.rand(like.shape, dtype=torch.float64, device=like.device)
    sign = 1 - 2 * torch.randint(0, 2, like.shape, device=like.device)
    if share < 1e-300:
        # The tail underflows: all of it is at the threshold.
        return sign * threshold
    numbers: torch.Tensor = sign * -torch.special.ndtri((1 - drawn) * share)
    return numbers
