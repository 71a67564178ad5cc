"""Every metric over dense float64 rows: by SciPy if available, else by its formula."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from scipy.spatial.distance import cdist

Dense = npt.NDArray[np.float64]


def _ratio(above: Dense, below: Dense) -> Dense:
    """0 / 0 = 0, as in the definition of the set distances (SciPy: NaN)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((above == 0) & (below == 0), 0.0, above / below)


def _by_pairs(of: Callable[[Dense, Dense], Dense]) -> Callable[[Dense, Dense], Dense]:
    return lambda a, b: np.stack([of(row[None, :], b) for row in a])


def _cosine(a: Dense, b: Dense) -> Dense:
    zero_a, zero_b = ~a.any(axis=1), ~b.any(axis=1)
    with np.errstate(invalid="ignore"):
        made = cdist(a, b, "cosine")
    made[zero_a] = 1.0
    made[:, zero_b] = 1.0
    made[np.ix_(zero_a, zero_b)] = 0.0
    return made


def _shares(a: Dense) -> Dense:
    total = a.sum(axis=1, keepdims=True)
    return a / np.where(total > 0, total, 1.0)


def _relative(a: Dense, b: Dense) -> Dense:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(a > 0, a * np.log(a / b), 0.0)


def _jensen_shannon(a: Dense, b: Dense) -> Dense:
    middle = (a + b) / 2
    both = _relative(a, middle) + _relative(np.broadcast_to(b, middle.shape), middle)
    return np.sqrt(np.maximum(both.sum(axis=1), 0.0) / 2)


def _kl_shared(a: Dense, b: Dense) -> Dense:
    return np.where(b > 0, _relative(a, np.where(b > 0, b, 1.0)), 0.0).sum(axis=1) / 2


def _correlation(a: Dense, b: Dense) -> Dense:
    with np.errstate(invalid="ignore", divide="ignore"):
        return cdist(a, b, "correlation")


FORMULAS: dict[str, Callable[[Dense, Dense], Dense]] = {
    "braycurtis": _by_pairs(
        lambda a, b: _ratio(np.abs(a - b).sum(axis=1), np.abs(a + b).sum(axis=1))
    ),
    "canberra": lambda a, b: cdist(a, b, "canberra"),
    "chebyshev": lambda a, b: cdist(a, b, "chebyshev"),
    "correlation": _correlation,
    "cosine": _cosine,
    "dice": _by_pairs(
        lambda a, b: _ratio(
            ((a != 0) ^ (b != 0)).sum(axis=1) * 1.0, ((a != 0) * 1 + (b != 0)).sum(axis=1) * 1.0
        )
    ),
    "euclidean": lambda a, b: cdist(a, b, "euclidean"),
    "hamming": lambda a, b: cdist(a, b, "hamming"),
    "hellinger": lambda a, b: cdist(np.sqrt(_shares(a)), np.sqrt(_shares(b))) / np.sqrt(2),
    "inner_product": lambda a, b: a @ b.T,
    "jaccard": lambda a, b: cdist(a != 0, b != 0, "jaccard"),
    "jensenshannon": lambda a, b: _by_pairs(_jensen_shannon)(_shares(a), _shares(b)),
    "kl": _by_pairs(lambda a, b: _relative(a, b).sum(axis=1)),
    "kl_intersection": _by_pairs(_kl_shared),
    "manhattan": lambda a, b: cdist(a, b, "cityblock"),
    "minkowski": lambda a, b: cdist(a, b, "minkowski", p=3),
    "russellrao": lambda a, b: cdist(a != 0, b != 0, "russellrao"),
    "ruzicka": _by_pairs(
        lambda a, b: _ratio(np.abs(a - b).sum(axis=1), np.maximum(a, b).sum(axis=1))
    ),
    "sqeuclidean": lambda a, b: cdist(a, b, "sqeuclidean"),
}
OPTIONS: dict[str, dict[str, float]] = {"minkowski": {"p": 3}}
NON_NEGATIVE = ("hellinger", "jensenshannon", "kl", "kl_intersection", "ruzicka")
# Metrics with D(x, x) = 0 for every row that is not empty or constant.
ZERO_AT_SELF = tuple(sorted(set(FORMULAS) - {"inner_product", "kl_intersection", "russellrao"}))


def skewed(
    rows: int, columns: int, seed: int, *, negative: bool = False, mean: float = 8.0
) -> sp.csr_matrix:
    """Columns with word-like frequencies, some in nearly every row; two rows empty, two equal."""
    rng = np.random.default_rng(seed)
    popularity = np.minimum(0.9, mean / (1 + np.arange(columns)) ** 0.9)
    chosen = rng.random((rows, columns)) < popularity
    values = rng.gamma(2.0, size=(rows, columns))
    if negative:
        values *= rng.choice([-1.0, 1.0], size=values.shape)
    # Some values are equal, for Hamming.
    values = np.where(rng.random(values.shape) < 0.3, np.round(values) + np.sign(values), values)
    dense = np.where(chosen, values, 0.0)
    dense[rows // 2] = dense[rows // 3]
    dense[0] = 0.0
    dense[rows - 1] = 0.0
    return sp.csr_matrix(dense)
