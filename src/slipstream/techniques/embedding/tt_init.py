"""First numbers of a tensor train: cores whose product looks like a normal table.

Products of normal numbers are far too often near zero. Entries are therefore drawn from N(0, 1)
under the condition that they are at least a threshold away from zero; the threshold is the one at
which the fourth moment of the product is a normal number's. With four cores of low rank independent
entries cannot reach it: there the slices of the inner cores are random rotations, which keep the
length of the row that comes in, so that nothing but the first and the last core spreads it.

Source: the conditioned draw of Yin, Acun, Liu and Wu, "TT-Rec: Tensor Train Compression for Deep
Learning Recommendation Models", MLSys 2021. Scale and threshold are derived here: the published
code's scale leaves the ranks out, which makes a table of rank 32 hundreds of times too wide.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

LEAST_STD = 0.1
"""Of a train that is trained in the place of a table: tables of click models begin nearer to zero.

A step of the optimizer moves every slice, and with it every row. The entries of cores whose product
is next to zero are no larger than the first steps, after which all slices are much alike.
"""

_NO_THRESHOLD, _HIGHEST_THRESHOLD = 0.0, 30.0


def sampled_gaussian(cores: Sequence[torch.Tensor], std: float) -> None:
    """Fill cores, [p, R, q, R'] each, so that the table's numbers have this standard deviation."""
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
    """As `sampled_gaussian` with normal entries: for comparison, and for high ranks the same."""
    ranks = [core.shape[1] for core in cores[1:]]
    scale = (std / math.sqrt(math.prod(ranks))) ** (1 / len(cores))
    with torch.no_grad():
        for core in cores:
            core.normal_(std=scale)


@functools.cache
def _threshold(ranks: tuple[int, ...]) -> float:
    """Where entries' fourth moment gives the product a normal number's."""
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
    """Of a product of cores of independent entries with zero mean.

    Args:
        ranks: R_1 to R_(d-1).
        kurtosis: of the entries, E x^4 / (E x^2)^2; 3 for normal ones, at least 1.
    """
    # Of a row vector v with as many entries as the rank: E v_i^4 and E v_i^2 v_j^2, entries of the
    # cores having unit variance. One core further, v'_k = sum_i v_i B_ik.
    fourth, mixed = kurtosis, 1.0
    for rank in ranks:
        pairs = rank * (rank - 1) * mixed
        fourth, mixed = rank * fourth * kurtosis + 3 * pairs, rank * fourth + pairs
    return fourth / math.prod(ranks) ** 2 - 3


def rotated_excess_kurtosis(ranks: Sequence[int], kurtosis: float) -> float:
    """As `excess_kurtosis` of equal ranks R, the slices of inner cores being random rotations.

    A row u with R independent entries is turned to e |u|, e uniform on the sphere, and multiplied
    by a column v of such entries: E |u|^4 E (e v)^4, where E e_i^4 = 3 / (R (R + 2)) and
    E e_i^2 e_j^2 = 1 / (R (R + 2)).
    """
    rank = ranks[0]
    return 3 * (kurtosis + rank - 1) ** 2 / (rank * (rank + 2)) - 3


def needs_rotations(ranks: Sequence[int]) -> bool:
    """Whether independent entries are too often near zero at any threshold; of equal ranks."""
    return len(set(ranks)) == 1 and len(ranks) > 1 and excess_kurtosis(ranks, 1.0) > 0


def _rotations(like: torch.Tensor) -> torch.Tensor:
    """For each row and column of a core [p, R, q, R] a uniform rotation, of mean square 1.

    Source: Mezzadri, "How to Generate Random Matrices from the Classical Compact Groups", 2007.
    """
    rows, rank, columns, _ = like.shape
    drawn = torch.randn(rows, columns, rank, rank, dtype=torch.float64, device=like.device)
    turned, upper = torch.linalg.qr(drawn)
    turned = turned * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    rotations: torch.Tensor = turned.permute(0, 2, 1, 3) * math.sqrt(rank)
    return rotations


def _moments(threshold: float) -> tuple[float, float]:
    """Of N(0, 1) beyond the threshold: E x^2, and E x^4 over its square."""
    # The density over the tail, by the scaled complementary error function: both underflow.
    tail = torch.special.erfcx(torch.tensor(threshold / math.sqrt(2), dtype=torch.float64))
    hazard = math.sqrt(2 / math.pi) / float(tail)
    second = 1 + threshold * hazard
    return second, (threshold**3 * hazard + 3 * second) / second**2


def _beyond(threshold: float, like: torch.Tensor) -> torch.Tensor:
    """Normal numbers at least so far from zero, with random signs."""
    share = math.erfc(threshold / math.sqrt(2)) / 2
    drawn = torch.rand(like.shape, dtype=torch.float64, device=like.device)
    sign = 1 - 2 * torch.randint(0, 2, like.shape, device=like.device)
    if share < 1e-300:
        # A tail too thin for its own density: all of it lies at the threshold.
        return sign * threshold
    numbers: torch.Tensor = sign * -torch.special.ndtri((1 - drawn) * share)
    return numbers
