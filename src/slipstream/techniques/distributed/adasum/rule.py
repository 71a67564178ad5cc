"""Adasum's rule: a sum where vectors are orthogonal, a mean where they are parallel.

Of two vectors, ``Adasum(a, b) = (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b``: one step of SGD after
the other, where the second sees the loss's curvature as the rank-one Fisher matrix of its own
gradient, averaged over both orders. Of more, a tree: the left branch has the largest power of two
of them that is less than all, so that neighbours meet first, and a vector more or less changes the
tree at its right edge only. Source: Maleki et al., MLSys 2021, 2006.02924.

Whatever the tree, the result is a weighted sum of the vectors, and the weights follow from the
vectors' scalar products alone.

How orthogonal workers' gradients are is what there is to gain over averaging. It follows from two
numbers a layer, the squared length of the mean gradient and the variance of one worker's around
it, which the statistic "grads" of a profile records: for any number of workers. Source: the two
numbers are those of McCandlish et al., "An Empirical Model of Large-Batch Training", 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from slipstream.graph import GradientNoise, Statistics

# Of the terms that a squared norm is the sum of: less is rounding, and the vector is zero.
_ROUNDING = 1e-13


def adasum_of(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Adasum of any number of vectors, by the definition, in float64: the reference.

    Args:
        vectors: one a worker, floating, all of the same shape; each a whole layer.

    Returns:
        A tensor of their shape and dtype.

    Raises:
        InvalidArgumentError: none, or unlike each other, or not floating.
    """
    import torch

    if not len(vectors):
        raise InvalidArgumentError("vectors", "there are none")
    first = vectors[0]
    for number, vector in enumerate(vectors):
        if not vector.is_floating_point() or vector.layout != torch.strided:
            raise InvalidArgumentError(
                f"vectors[{number}]", f"it is {vector.dtype}, {vector.layout}",
                remedy="dense floating numbers",
            )  # fmt: skip
        if vector.shape != first.shape or vector.dtype != first.dtype:
            raise InvalidArgumentError(
                f"vectors[{number}]",
                f"it is {vector.dtype} {list(vector.shape)}, vectors[0] {first.dtype} "
                f"{list(first.shape)}",
            )
    return _tree([vector.double() for vector in vectors]).to(first.dtype)


def _tree(vectors: list[torch.Tensor]) -> torch.Tensor:
    if len(vectors) == 1:
        return vectors[0]
    left = left_of(len(vectors))
    a, b = _tree(vectors[:left]), _tree(vectors[left:])
    # Scaled, so that no square is too large or too small for float64; zero stays zero.
    scale = float(max(a.abs().max(), b.abs().max())) if a.numel() else 0.0
    if scale == 0.0 or not np.isfinite(scale):
        return a + b
    a, b = a / scale, b / scale
    ab, aa, bb = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    weight_a = 1.0 - ab / (2.0 * aa) if aa > 0.0 else 1.0
    weight_b = 1.0 - ab / (2.0 * bb) if bb > 0.0 else 1.0
    return (weight_a * a + weight_b * b) * scale


def left_of(count: int) -> int:
    """How many of `count` > 1 vectors the left branch of the tree has."""
    return 1 << ((count - 1).bit_length() - 1)


def weights(products: Any) -> Any:
    """What each vector is multiplied with before they are added up.

    Args:
        products: scalar products of the vectors, by layer, float64 [layers, workers, workers].

    Returns:
        float64 [layers, workers]; NaN for layers with a product that is not finite.
    """
    products = np.asarray(products, np.float64)
    layers, workers = products.shape[:2]
    factors = np.zeros((layers, workers))
    with np.errstate(all="ignore"):
        _weigh(products, factors, 0, workers)
        bad = ~np.isfinite(products).all((1, 2))
    factors[bad] = np.nan
    return factors


def _weigh(products: Any, found: Any, begin: int, end: int) -> None:
    """Fill the weights of vectors `begin` to `end` within their branch."""
    if end - begin == 1:
        found[:, begin] = 1.0
        return
    middle = begin + left_of(end - begin)
    _weigh(products, found, begin, middle)
    _weigh(products, found, middle, end)
    a, b = slice(begin, middle), slice(middle, end)
    aa, bb = _squared(products, found, a), _squared(products, found, b)
    ab = np.einsum("li,lij,lj->l", found[:, a], products[:, a, b], found[:, b])
    # A branch that is zero adds nothing, whatever it is multiplied with.
    found[:, a] *= np.where(aa > 0, 1.0 - ab / (2.0 * np.where(aa > 0, aa, 1.0)), 1.0)[:, None]
    found[:, b] *= np.where(bb > 0, 1.0 - ab / (2.0 * np.where(bb > 0, bb, 1.0)), 1.0)[:, None]


def _squared(products: Any, found: Any, branch: slice) -> Any:
    """Squared norms of a branch, exactly zero where only rounding is left of it."""
    of_branch, factors = products[:, branch, branch], found[:, branch]
    terms = factors[:, :, None] * of_branch * factors[:, None, :]
    total, size = terms.sum((1, 2)), np.abs(terms).sum((1, 2))
    return np.where(total > _ROUNDING * size, total, 0.0)


def orthogonality(products: Any) -> Any:
    """``|Adasum(g_1 .. g_p)|^2 / sum |g_i|^2``, layer by layer: 1 where vectors are orthogonal.

    1 / workers where they are parallel: then Adasum is the mean, and gains nothing over it.

    Args:
        products: as of `weights`.

    Returns:
        float64 [layers]; NaN for layers that are zero.
    """
    products = np.asarray(products, np.float64)
    factors = weights(products)
    with np.errstate(all="ignore"):
        combined = np.einsum("li,lij,lj->l", factors, products, factors)
        return combined / np.einsum("lii->l", products)


@dataclass(frozen=True)
class Benefit:
    """Of all layers together, weighed by the squares of their gradients.

    Attributes:
        workers: whose gradients are combined.
        orthogonality: ``|Adasum|^2 / sum |g_i|^2``: 1 where they are orthogonal, 1 / workers where
            they are parallel and Adasum is the mean.
        step: how many times as long as the mean Adasum's update is; 1 where nothing is gained.
    """

    workers: int
    orthogonality: float
    step: float

    def worth(self, loss: float) -> float:
        """What trainings can be ranked by: those of more gain more over averaging, in the end.

        A longer update is worth what is left to learn; so it is orthogonality times that.

        Args:
            loss: of the samples the gradients are of, near the end of a training that averages.
        """
        return self.orthogonality * loss

    def __str__(self) -> str:
        return (
            f"gradients of {self.workers} workers are orthogonal to {self.orthogonality:.2f} "
            f"(parallel: {1 / self.workers:.2f}), an update is {self.step:.1f} times as long as "
            "their mean"
        )


def benefit(products: Any) -> Benefit:
    """From scalar products of the workers' gradients, by layer, float64 [layers, workers, workers].

    Raises:
        InvalidArgumentError: they are not products of at least one layer and worker, not finite, or
            all zero.
    """
    products = np.asarray(products, np.float64)
    if products.ndim != 3 or not products.size or products.shape[1] != products.shape[2]:
        raise InvalidArgumentError(
            "products", f"its shape is {list(products.shape)}", remedy="[layers, workers, workers]"
        )
    given = float(np.einsum("lii->", products))
    if not np.isfinite(products).all() or given <= 0.0:
        raise InvalidArgumentError("products", "they are not finite, or all zero")
    workers = products.shape[1]
    factors = weights(products)
    combined = float(np.einsum("li,lij,lj->", factors, products, factors))
    mean = float(products.sum()) / workers**2
    step = math.sqrt(combined / mean) if mean > 0.0 else math.inf
    return Benefit(workers, combined / given, step)


def expected_products(noise: Sequence[GradientNoise], workers: int) -> Any:
    """Scalar products that gradients of so many workers have on average.

    Each worker's batch is one like those of the recorded steps.

    Returns:
        float64 [layers, workers, workers].

    Raises:
        InvalidArgumentError: fewer than one worker, or gradients of fewer than two steps.
    """
    if workers < 1:
        raise InvalidArgumentError("workers", f"{workers} is less than 1")
    variances = [one.variance for one in noise]
    if not variances or any(one is None for one in variances):
        raise InvalidArgumentError(
            "noise", "it says nothing of how gradients vary between steps",
            remedy="profile at least two steps: slipstream profile WORKLOAD --record grads",
        )  # fmt: skip
    sizes = np.array([one.elements for one in noise], np.float64)
    spread = np.array(variances, np.float64) * sizes
    squares = np.array([one.mean_square for one in noise], np.float64) * sizes
    signal = np.maximum(squares - spread, 0.0)
    alike, identity = np.ones((workers, workers)), np.eye(workers)
    return signal[:, None, None] * alike + spread[:, None, None] * identity


def adasum_benefit(statistics: Statistics, workers: int, per_node: int = 1) -> Benefit | None:
    """From what a profile recorded; None where it recorded no gradients, or all of one batch.

    Args:
        per_node: workers that are averaged first: their mean's variance is that much less.
    """
    noise = [
        replace(one, variance=one.variance / per_node, mean_square=_less(one, per_node))
        for one in statistics.grads
        if one.variance is not None and one.mean_square > 0.0
    ]
    if not noise or statistics.same_batch:
        return None
    return benefit(expected_products(noise, workers // per_node))


def _less(one: GradientNoise, per_node: int) -> float:
    """Mean square of an element of the mean over a node."""
    spread = one.variance or 0.0
    return max(one.mean_square - spread, 0.0) + spread / per_node
