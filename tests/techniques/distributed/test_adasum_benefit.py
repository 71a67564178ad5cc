"""The gain of Adasum from one step's gradients, against gradients drawn with known noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slipstream.errors import InvalidArgumentError
from slipstream.graph import GradientNoise, Statistics
from slipstream.techniques.distributed import adasum_benefit
from slipstream.techniques.distributed.adasum.rule import benefit, expected_products
from slipstream.techniques.distributed.adasum.technique import Adasum
from small_steps import graph_of


def noise(elements: int, mean_square: float, variance: float | None) -> GradientNoise:
    return GradientNoise("w", elements, 8, 1.0, mean_square, variance, 0.0, 0.1)


def statistics(*grads: GradientNoise, same_batch: bool = False) -> Statistics:
    return Statistics(recorded=("grads",), steps=8, same_batch=same_batch, grads=grads)


def test_identical_gradients_gain_nothing_and_orthogonal_ones_give_the_sum() -> None:
    identical = benefit(np.ones((2, 4, 4)))
    assert (identical.orthogonality, identical.step) == pytest.approx((0.25, 1.0))
    unlike = benefit(np.eye(4)[None])
    assert (unlike.orthogonality, unlike.step) == pytest.approx((1.0, 4.0))


def test_worth_grows_with_dissimilarity_and_the_need_for_learning() -> None:
    identical, unlike = benefit(np.ones((1, 4, 4))), benefit(np.eye(4)[None])
    assert identical.worth(0.5) == pytest.approx(0.125)
    assert identical.worth(0.5) < unlike.worth(0.5) < unlike.worth(0.6)


@pytest.mark.parametrize("workers", [2, 5, 16])
def test_two_statistics_per_layer_predict_the_gain_of_drawn_gradients(workers: int) -> None:
    drawn = np.random.default_rng(workers)
    products, grads = [], []
    for elements, signal, spread in ((4000, 1.0, 0.5), (9000, 0.1, 2.0)):
        mean = drawn.normal(size=elements) * signal
        rows = mean + drawn.normal(size=(workers, elements)) * spread
        products.append(rows @ rows.T)
        square = float((mean**2).mean())
        grads.append(noise(elements, square + spread**2, spread**2))
    seen, estimated = benefit(np.stack(products)), benefit(expected_products(grads, workers))
    assert estimated.orthogonality == pytest.approx(seen.orthogonality, rel=0.05)
    assert estimated.step == pytest.approx(seen.step, rel=0.05)


def test_averaged_groups_of_workers_count_as_one_with_less_noise() -> None:
    found = adasum_benefit(statistics(noise(100, 3.0, 2.0)), 8, per_node=4)
    assert found is not None
    assert found == benefit(expected_products([noise(100, 1.5, 0.5)], 2))


def test_a_prediction_reports_the_gain_if_the_profile_has_gradients() -> None:
    graph = graph_of("mlp")
    assert "orthogonal" not in Adasum(4).quality(graph).basis
    graph = replace(graph, statistics=statistics(noise(100, 1.0, 1.0)))
    assert "orthogonality 1.00 (0.25 if parallel)" in Adasum(4).quality(graph).basis
    assert "4.0 times as long" in Adasum(4).quality(graph).basis


def test_without_gradients_no_gain_is_reported() -> None:
    assert adasum_benefit(Statistics(), 4) is None
    assert adasum_benefit(statistics(noise(10, 1.0, None)), 4) is None
    assert adasum_benefit(statistics(noise(10, 1.0, 0.5), same_batch=True), 4) is None


def test_invalid_products_are_named() -> None:
    for products in (np.zeros((1, 2, 2)), np.ones((2, 2)), np.full((1, 2, 2), np.nan)):
        with pytest.raises(InvalidArgumentError, match="products"):
            benefit(products)
    with pytest.raises(InvalidArgumentError, match="noise"):
        expected_products([noise(10, 1.0, None)], 2)
    with pytest.raises(InvalidArgumentError, match="workers"):
        expected_products([noise(10, 1.0, 0.5)], 0)
