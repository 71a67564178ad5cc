"""Adasum's rule: a sum where vectors are orthogonal, a mean where they are parallel.

Of two vectors, ``Adasum(a, b) = (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b``: one step of SGD after
the other, where the second sees the loss's curvature as the rank-one Fisher matrix of its own
gradient, averaged over both orders. Of more, a tree: the left branch has the largest power of two
of them that is less than all, so that neighbours meet first, and a vector more or less changes the
tree at its right edge only. Source: Maleki et al., MLSys 2021, 2006.02924.

Whatever the tree, the result is a weighted sum of the vectors, and the weights follow from the
vectors' scalar products alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

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
    found = np.zeros((layers, workers))
    with np.errstate(all="ignore"):
        _weigh(products, found, 0, workers)
        bad = ~np.isfinite(products).all((1, 2))
    found[bad] = np.nan
    return found


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
    found = weights(products)
    with np.errstate(all="ignore"):
        combined = np.einsum("li,lij,lj->l", found, products, found)
        return combined / np.einsum("lii->l", products)
