"""The layouts chosen are those an exhaustive search finds."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.fusion.selection import Factor, select, total
from slipstream_bench.systems.fusion.networks import exhaustive, network


@pytest.mark.parametrize("seed", range(200))
def test_it_costs_what_the_exhaustive_optimum_costs(seed: int) -> None:
    factors = network(seed)
    chosen = select(factors)
    assert chosen.cost == pytest.approx(exhaustive(factors), rel=1e-12)
    if math.isfinite(chosen.cost):
        assert total(factors, chosen.layouts) == pytest.approx(chosen.cost, rel=1e-12)


def test_time_grows_with_configurations_not_with_the_length_of_the_network() -> None:
    rng = np.random.default_rng(0)
    chain = [Factor((n, n + 1), rng.random((24, 24))) for n in range(400)]
    began = time.process_time()
    chosen = select(chain)
    assert time.process_time() - began < 10
    best = np.zeros(24)
    for one in chain:
        best = (best[:, None] + one.cost).min(axis=0)
    assert chosen.cost == pytest.approx(best.min())


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ([Factor(("a", "b"), np.zeros(3))], "axes"),
        ([Factor(("a",), np.zeros(3)), Factor(("a",), np.zeros(2))], "layouts"),
        ([Factor(("a",), np.array([1.0, math.nan]))], "not a number"),
        ([Factor(tuple(range(12)), np.zeros([1] * 12)), Factor(("a",), np.zeros(0))], "layouts"),
    ],
)
def test_what_is_no_problem_is_named(factors: list[Factor], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        select(factors)
