"""Boosted symmetric trees in NumPy: every level of a tree has one feature and one threshold.

Source: Prokhorenkova et al., "CatBoost: unbiased boosting with categorical features", NeurIPS 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_BINS = 64
_L2 = 3.0
# Rows that are scored together, so that their comparisons stay in the cache.
_BLOCK = 256


@dataclass(frozen=True)
class Forest:
    """A sum of symmetric trees.

    Attributes:
        features: columns (trees x levels).
        thresholds: a level's bit is set if the column is greater (trees x levels).
        leaves: value by bits, the first level's being the highest (trees x 2^levels).
    """

    features: Array
    thresholds: Array
    leaves: Array

    def __call__(self, rows: Array) -> Array:
        """Return the sum of the trees for each row."""
        trees, levels = self.features.shape
        powers = (1 << np.arange(levels - 1, -1, -1)).astype(np.uint8)
        columns, limits = self.features.ravel(), self.thresholds.ravel()
        starts = np.arange(trees) << levels
        leaves = self.leaves.ravel()
        sums = np.empty(len(rows))
        for first in range(0, len(rows), _BLOCK):
            block = rows[first : first + _BLOCK]
            bits = (block.take(columns, 1) > limits).reshape(-1, levels)
            places = (bits.view(np.uint8) @ powers).reshape(len(block), trees) + starts
            sums[first : first + _BLOCK] = leaves.take(places).sum(1)
        return sums


def fit(
    rows: Array, gradient: Callable[[Array], tuple[Array, Array]], trees: int,
    rng: np.random.Generator, *, levels: int = 8, rate: float = 0.1, columns: float = 0.3,
    sample: float = 0.5, report: Callable[[int, Array], None] = lambda tree, sums: None,
) -> Forest:  # fmt: skip
    """Fit trees to the gradients of a loss.

    Args:
        rows: features (rows x columns).
        gradient: from the present sums to the loss's first and second derivatives per row.
        columns, sample: fraction of columns and rows that each tree uses.
        report: called after each tree with its number and the present sums.
    """
    count, width = rows.shape
    edges = [_edges(rows[:, column]) for column in range(width)]
    binned = np.stack([np.searchsorted(e, c, "left") for e, c in zip(edges, rows.T, strict=True)])
    binned = binned.astype(np.int32)
    useful = np.flatnonzero([len(e) for e in edges])
    sums = np.zeros(count)
    found = Forest(
        np.zeros((trees, levels), np.int32), np.zeros((trees, levels), np.float32),
        np.zeros((trees, 1 << levels), np.float32),
    )  # fmt: skip
    for tree in range(trees):
        slope, curvature = gradient(sums)
        chosen = np.flatnonzero(rng.random(count) < sample)
        some = rng.permutation(useful)[: max(1, int(columns * len(useful)))]
        node = np.zeros(count, np.int32)
        for level in range(levels):
            best = (-1.0, 0, 0)
            part, g, h = node[chosen] * _BINS, slope[chosen], curvature[chosen]
            for column in some:
                at = part + binned[column, chosen]
                size = _BINS << level
                first = np.bincount(at, g, size).reshape(-1, _BINS).cumsum(1)
                second = np.bincount(at, h, size).reshape(-1, _BINS).cumsum(1)
                gain = first**2 / (second + _L2)
                gain += (first[:, -1:] - first) ** 2 / (second[:, -1:] - second + _L2)
                total = gain.sum(0)[: len(edges[column])]
                place = int(total.argmax())
                best = max(best, (float(total[place]), int(column), place))
            _, column, place = best
            found.features[tree, level] = column
            found.thresholds[tree, level] = edges[column][place]
            node = 2 * node + (binned[column] > place)
        first = np.bincount(node[chosen], slope[chosen], 1 << levels)
        second = np.bincount(node[chosen], curvature[chosen], 1 << levels)
        found.leaves[tree] = -rate * first / (second + _L2)
        sums += found.leaves[tree][node]
        report(tree, sums)
    return found


def _edges(column: Array) -> Array:
    """Return thresholds between different values, at most `_BINS` - 1."""
    values = np.unique(column)
    if len(values) > _BINS:
        values = np.unique(np.quantile(column, np.linspace(0, 1, _BINS + 1)[1:-1]))
        return values[:-1] if len(values) == _BINS else values
    middles: Array = (values[:-1] + values[1:]) / 2
    return middles
