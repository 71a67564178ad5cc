"""What Adasum would gain over averaging, told from gradients of one step.

Where workers' gradients are orthogonal Adasum adds them up, where they are parallel it averages
them, as averaging does: how orthogonal they are is what there is to gain. It follows from two
numbers a layer, the squared length of the mean gradient and the variance of one worker's around
it, which the statistic "grads" of a profile records: for any number of workers.

Source: Maleki et al., MLSys 2021, 2006.02924; the two numbers are those of McCandlish et al., "An
Empirical Model of Large-Batch Training", 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.distributed.adasum.rule import weights

if TYPE_CHECKING:
    from slipstream.graph import GradientNoise, Statistics


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
    found = weights(products)
    combined = float(np.einsum("li,lij,lj->", found, products, found))
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
    alike, own = np.ones((workers, workers)), np.eye(workers)
    return signal[:, None, None] * alike + spread[:, None, None] * own


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
