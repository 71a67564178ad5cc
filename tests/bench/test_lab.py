"""Functions that benches run on ranks, each on two ranks at its smallest size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from slipstream.measure.records import Phase
from slipstream_bench.harness import paired
from slipstream_bench.lab import SENT, Turn, arms_on_ranks, on_ranks
from slipstream_bench.systems.adasum import rank as adasum
from slipstream_bench.systems.collectives import rank as collectives
from slipstream_bench.systems.compression import rank as compression
from slipstream_bench.systems.measure import tasks as measure
from slipstream_bench.systems.priority import rank as priority
from slipstream_bench.systems.priority import trials
from slipstream_bench.systems.scale import ranks as scale

pytestmark = pytest.mark.full

SPEC = [2, 8, 0.0, 0.0, 2]
BOTH = {"nbytes": 4096, "ranks": [0, 1], "repeats": 1, "warmup": 0}


@pytest.mark.parametrize(
    ("function", "arguments", "size"),
    [
        (
            adasum.memory,
            {"numbers": 1 << 16, "layers": 3, "algorithm": "gram", "dtypes": ["float16"]},
            1,
        ),
        (adasum.memory_of_a_step, {"numbers": 1 << 16, "layers": 2, "algorithm": "gram"}, 2),
        (collectives.equal, {"numbers": 1000}, 2),
        (collectives.steps, {"model_spec": SPEC, "bucket_mb": 1.0, "repeats": 1,
                             "arms": ["plain", "sharded", "two_d"]}, 3),
        (compression.replicas, {"methods": ["sign", "topk:0.01"], "steps": 3}, 2),
        (compression.losses, {"methods": ["torch"], "steps": 3, "rank_of": 4, "start": 2}, 1),
        (compression.exchanges, {"methods": ["sign"], "side": 8, "repeats": 1}, 1),
        (compression.steps, {"methods": ["none", "sign", "accumulation:2+cast:bf16", "meeting"],
                             "model": SPEC, "bucket_mb": 1.0, "slow_s": 1e-9, "decide": 5,
                             "rounds": 1, "operations": [{"kind": "p2p", **BOTH},
                                                         {"kind": "all_reduce", **BOTH}]}, 2),
        (priority.steps, {"workload": "tail-heavy", "compute_s": 0.01,
                          "methods": ["ddp:25", "static:50000"], "count": 2}, 2),
        (priority.weights, {"methods": ["static"], "optimizers": ["sgd"], "count": 3}, 1),
        (priority.loops, {"order": "static:256", "count": 3}, 5),
        (priority.turns, {"workload": "tiny", "methods": ["static", "ddp:25"], "count": 4,
                          "turns": 2}, 6),
        (trials.run, {"count": 2, "seed": 0}, 2),
        (measure.all_reduce, {"elements": 1000}, 2),
        (scale.timed_steps, {"name": "narrow", "warmup": 1, "steps": 2}, 2),
    ],
    ids=lambda value: f"{value.__module__}.{value.__name__}" if callable(value) else "",
)  # fmt: skip
def test_every_function_of_a_rank_returns(
    function: Callable[..., Any], arguments: dict[str, Any], size: int
) -> None:
    answers = on_ranks(2, function, limit_s=300.0, **arguments)
    assert [len(answer) for answer in answers] == [size, size]


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (adasum.against_all_reduce, {"numbers": 1000, "layers": 3}),
        (adasum.of_layers, {"numbers": 1000, "layers": [2, 8]}),
        (collectives.exchanges, {"nbytes": 4096, "arms": ["all_reduce", "two_d"]}),
    ],
)
def test_arms_of_ranks_are_compared_with_each_other(
    build: Callable[..., Mapping[str, Turn]], arguments: dict[str, Any]
) -> None:
    with arms_on_ranks(2, build, **arguments) as arms:
        taken = paired(arms, clock="wall", blocks=4, settle_s=0.0)
    first, second = taken.arms
    assert taken.ratio(first, second).n >= 3
    assert taken.experiment.series[second, SENT, Phase.MEASURE].values.min() > 0
