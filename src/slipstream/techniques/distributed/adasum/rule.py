"""Adasum's rule: a sum where vectors are orthogonal, a mean where they are parallel.

For two vectors, ``Adasum(a, b) = (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b``: two sequential steps
of SGD, averaged over both orders, with the curvature at the second approximated by the rank-one
Fisher matrix of its gradient. More vectors are combined in a tree: the left branch contains the
largest power of two of them below the total, so that neighbours are combined first, and adding a
vector changes the tree at its right edge only. Source: Maleki et al., MLSys 2021, 2006.02924.

The result is always a weighted sum of the vectors, and the weights depend only on the dot products
of the vectors.

The gain over averaging is the orthogonality of the workers' gradients. For any number of workers it
follows from two numbers per layer, recorded by the statistic "grads" of a profile: the squared norm
of the mean gradient, and the variance of one worker's gradient around it. Source: the two numbers
are those of McCandlish et al., "An Empirical Model of Large-Batch Training", 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import InvalidArgumentError

if TYPE_CHECKING:
    from slipstream.graph import GradientNoise, Statistics

# A squared norm below this fraction of its terms is rounding error, and the vector is zero.
_ROUNDING = 1e-13


def left_of(count: int) -> int:
    """Return the size of the left branch of a tree of `count` > 1 vectors."""
    return 1 << ((count - 1).bit_length() - 1)


def weights(products: Any) -> Any:
    """Return the weights of the vectors in their Adasum.

    Args:
        products: dot products of the vectors, float64 [layers, workers, workers].

    Returns:
        float64 [layers, workers]; NaN for layers with a non-finite product.
    """
    products = np.asarray(products, np.float64)
    layers, workers = products.shape[:2]
    factors = np.zeros((layers, workers))
    with np.errstate(all="ignore"):
        _weigh(products, factors, 0, workers)
        bad = ~np.isfinite(products).all((1, 2))
    factors[bad] = np.nan
    return factors


def _weigh(products: Any, factors: Any, begin: int, end: int) -> None:
    """Fill in the weights of vectors `begin` to `end` within their branch."""
    if end - begin == 1:
        factors[:, begin] = 1.0
        return
    middle = begin + left_of(end - begin)
    _weigh(products, factors, begin, middle)
    _weigh(products, factors, middle, end)
    a, b = slice(begin, middle), slice(middle, end)
    aa, bb = _squared(products, factors, a), _squared(products, factors, b)
    ab = np.einsum("li,lij,lj->l", factors[:, a], products[:, a, b], factors[:, b])
    # A zero branch contributes nothing, whatever its weight.
    factors[:, a] *= np.where(aa > 0, 1.0 - ab / (2.0 * np.where(aa > 0, aa, 1.0)), 1.0)[:, None]
    factors[:, b] *= np.where(bb > 0, 1.0 - ab / (2.0 * np.where(bb > 0, bb, 1.0)), 1.0)[:, None]


def _squared(products: Any, found: Any, branch: slice) -> Any:
    """Return squared norms of a branch, exactly zero if only rounding error remains."""
    of_branch, factors = products[:, branch, branch], found[:, branch]
    terms = factors[:, :, None] * of_branch * factors[:, None, :]
    total, size = terms.sum((1, 2)), np.abs(terms).sum((1, 2))
    return np.where(total > _ROUNDING * size, total, 0.0)


def orthogonality(products: Any) -> Any:
    """Return ``|Adasum(g_1 .. g_p)|^2 / sum |g_i|^2`` per layer.

    It is 1 for orthogonal vectors, and 1 / workers for parallel ones, where Adasum is the mean.

    Args:
        products: see `weights`.

    Returns:
        float64 [layers]; NaN for zero layers.
    """
    products = np.asarray(products, np.float64)
    factors = weights(products)
    with np.errstate(all="ignore"):
        combined = np.einsum("li,lij,lj->l", factors, products, factors)
        return combined / np.einsum("lii->l", products)


@dataclass(frozen=True)
class Benefit:
    """Expected gain of Adasum over averaging, over all layers weighted by squared gradients.

    Attributes:
        workers: number of workers.
        orthogonality: ``|Adasum|^2 / sum |g_i|^2``: 1 for orthogonal gradients, 1 / workers for
            parallel ones, where Adasum is the mean.
        step: norm of Adasum's update relative to that of the mean; 1 for no gain.
    """

    workers: int
    orthogonality: float
    step: float

    def worth(self, loss: float) -> float:
        """Return a score that ranks trainings by their final gain over averaging.

        A longer update helps in proportion to the remaining loss, hence orthogonality times loss.

        Args:
            loss: loss on the samples of the gradients, near the end of training with averaging.
        """
        return self.orthogonality * loss

    def __str__(self) -> str:
        return (
            f"gradients of {self.workers} workers have orthogonality {self.orthogonality:.2f} "
            f"({1 / self.workers:.2f} if parallel), an update is {self.step:.1f} times as long as "
            "their mean"
        )


def benefit(products: Any) -> Benefit:
    """Compute the benefit from dot products of gradients, float64 [layers, workers, workers].

    Raises:
        InvalidArgumentError: `products` is empty or has another shape, is not finite, or all zero.
    """
    products = np.asarray(products, np.float64)
    if products.ndim != 3 or not products.size or products.shape[1] != products.shape[2]:
        raise InvalidArgumentError(
            "products", f"its shape is {list(products.shape)}", remedy="[layers, workers, workers]"
        )
    sum_of_squares = float(np.einsum("lii->", products))
    if not np.isfinite(products).all() or sum_of_squares <= 0.0:
        raise InvalidArgumentError("products", "they are all zero or not finite")
    workers = products.shape[1]
    factors = weights(products)
    combined = float(np.einsum("li,lij,lj->", factors, products, factors))
    mean = float(products.sum()) / workers**2
    step = math.sqrt(combined / mean) if mean > 0.0 else math.inf
    return Benefit(workers, combined / sum_of_squares, step)


def expected_products(noise: Sequence[GradientNoise], workers: int) -> Any:
    """Return the expected dot products of the gradients of `workers` workers.

    Each worker's batch is assumed to be distributed as those of the recorded steps.

    Returns:
        float64 [layers, workers, workers].

    Raises:
        InvalidArgumentError: `workers` is below 1, or fewer than two steps were recorded.
    """
    if workers < 1:
        raise InvalidArgumentError("workers", f"{workers} is less than 1")
    variances = [layer.variance for layer in noise]
    if not variances or any(variance is None for variance in variances):
        raise InvalidArgumentError(
            "noise", "it has no variance of gradients between steps",
            remedy="profile at least two steps: slipstream profile WORKLOAD --record grads",
        )  # fmt: skip
    sizes = np.array([layer.elements for layer in noise], np.float64)
    spread = np.array(variances, np.float64) * sizes
    squares = np.array([layer.mean_square for layer in noise], np.float64) * sizes
    signal = np.maximum(squares - spread, 0.0)
    ones, identity = np.ones((workers, workers)), np.eye(workers)
    return signal[:, None, None] * ones + spread[:, None, None] * identity


def adasum_benefit(statistics: Statistics, workers: int, per_node: int = 1) -> Benefit | None:
    """Compute the benefit from a profile; None if it lacks gradients, or has a single batch.

    Args:
        per_node: number of workers averaged first, which divides the variance.
    """
    noise = [
        replace(
            layer,
            variance=layer.variance / per_node,
            mean_square=_node_mean_square(layer, per_node),
        )
        for layer in statistics.grads
        if layer.variance is not None and layer.mean_square > 0.0
    ]
    if not noise or statistics.same_batch:
        return None
    return benefit(expected_products(noise, workers // per_node))


def _node_mean_square(layer: GradientNoise, per_node: int) -> float:
    """Return the mean square of an element of the mean over a node."""
    spread = layer.variance or 0.0
    return max(layer.mean_square - spread, 0.0) + spread / per_node
