"""Experiments with known content, for tests of storing and showing them."""

from __future__ import annotations

import numpy as np

from slipstream.measure.environment import from_facts
from slipstream.measure.records import (
    ArmRecord,
    Claim,
    Environment,
    Event,
    Experiment,
    ExperimentSettings,
    Phase,
    PredictionRecord,
    Series,
    Verdict,
)

ENVIRONMENT = from_facts({"cpu.model": "Testor 3000", "torch.threads": 1, "now.load": [0.5]})
CREATED = "2026-01-02T03:04:05Z"


def environment(**changes: object) -> Environment:
    """`ENVIRONMENT` with changed facts; ``_`` represents the dot."""
    return from_facts(
        {**ENVIRONMENT.facts, **{k.replace("_", ".", 1): v for k, v in changes.items()}}
    )


def series(values: object, blocks: object = None) -> Series:
    """Return a `Series`, with one value per block by default."""
    column = np.asarray(values, np.float64)
    places = np.arange(len(column)) if blocks is None else np.asarray(blocks)
    return Series(column, places.astype(np.int32))


def prediction(**changes: object) -> PredictionRecord:
    """Predict half the cost for ``fast``."""
    settings: dict[str, object] = {
        "workload": "train.py:step",
        "technique": "lowrank:0.25",
        "metric": "cpu",
        "ratio": 0.5,
        "low": 0.4,
        "high": 0.625,
        "provenance": "simulated",
        "created": "2026-01-01T00:00:00Z",
        "env_id": ENVIRONMENT.env_id,
    }
    return PredictionRecord(**{**settings, **changes})  # type: ignore[arg-type]


def experiment(blocks: int = 60, ratio: float = 0.8, **changes: object) -> Experiment:
    """``fast`` costs `ratio` of ``base`` in both times; lognormal noise, an A/A guard, a gate."""
    rng = np.random.default_rng(5)
    shared = rng.lognormal(0, 0.1, blocks)
    columns = {}
    for arm, factor in (("base", 1.0), ("fast", ratio)):
        for metric, unit_ns in (("wall", 1.02e7), ("cpu", 1e7)):
            noise = rng.lognormal(0, 0.02, blocks)
            columns[arm, metric, Phase.MEASURE] = series(unit_ns * factor * shared * noise)
            columns[arm, metric, Phase.WARMUP] = series([2e7 * factor, 1.1e7 * factor])
    guard = columns["base", "cpu", Phase.MEASURE].values[::5] * rng.lognormal(0, 0.02, blocks)[::5]
    columns["base'", "cpu", Phase.MEASURE] = series(guard, np.arange(blocks)[::5])
    settings: dict[str, object] = {
        "title": "lowrank on a toy",
        "created": CREATED,
        "environment": ENVIRONMENT,
        "settings": ExperimentSettings("base", primary="cpu"),
        "arms": (
            ArmRecord("base", "unmodified", workload="train.py:step"),
            ArmRecord("fast", "lowrank", workload="train.py:step", technique="lowrank:0.25"),
            ArmRecord("base'", "the guard"),
        ),
        "series": columns,
        "events": (
            Event(0, "gate", {"state": "green", "values": {"load": 0.5}}),
            Event(40, "gate", {"state": "amber"}),
            Event(3, "warning", {"what": "<b>odd</b>"}),
            Event(blocks, "stop", {"reason": "budget"}),
        ),
    }
    return Experiment(**{**settings, **changes})  # type: ignore[arg-type]


def claim(**changes: object) -> Claim:
    """``fast`` was measured at 0.8."""
    settings: dict[str, object] = {
        "metric": "cpu",
        "arm": "fast",
        "baseline": "base",
        "estimator": "median_order_statistic",
        "ratio": 0.8,
        "low": 0.79,
        "high": 0.81,
        "level": 0.95,
        "verdict": Verdict.FASTER,
        "detectable": 0.012,
        "blocks": 60,
        "carries": True,
    }
    return Claim(**{**settings, **changes})  # type: ignore[arg-type]
