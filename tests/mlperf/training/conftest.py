"""One recorded comparison of the smallest task, shared by all tests that need real logs."""

from __future__ import annotations

import pytest

from slipstream.mlperf.training import TrainingResult, time_to_quality

SEEDS = (11, 22, 33)


@pytest.fixture(scope="session")
def judged(tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """Three runs of ``digits`` without techniques, and three with ``lowrank:0.25``."""
    folder = tmp_path_factory.mktemp("training") / "digits"
    return time_to_quality("digits", ["lowrank:0.25"], seeds=SEEDS, folder=folder)
