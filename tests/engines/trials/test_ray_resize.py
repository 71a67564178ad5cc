"""Resized trials have the same loss curve as others."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from slipstream.errors import InvalidArgumentError, MissingExtraError
from slipstream.search import Budget, Float, Space, TrialRun, study
from slipstream.search.estimators import RESIZE, Resized


def test_evaluation_stops_at_a_checkpoint_for_a_resize(tmp_path: Path) -> None:
    TrialRun(1.0, 0).checkpointed()
    run = TrialRun(1.0, 0, str(tmp_path))
    run.checkpointed()
    (tmp_path / RESIZE).touch()
    with pytest.raises(Resized):
        run.checkpointed()


@pytest.mark.full
def test_resized_trial_has_the_same_losses(
    tmp_path: Path, require: Callable[[str, bool, str], None]
) -> None:
    try:
        from slipstream_bench.trial_training import resized_trial

        resized, alone, widths = resized_trial(tmp_path)
    except (ImportError, MissingExtraError) as error:
        require("ray", False, str(error))
        return
    assert widths == [1, 2, 1]
    assert resized == pytest.approx(alone, rel=1e-5)


@pytest.mark.full
def test_refuses_to_resize_without_a_folder_for_checkpoints(
    require: Callable[[str, bool, str], None],
) -> None:
    require("ray", find_spec("ray") is not None, "Ray is not installed")
    from slipstream.engines.trials.ray_executor import RayExecutor

    whole = study("s", Space({"x": Float(0.0, 1.0)}), "y", estimator=lambda c: c["x"],
                  strategy="random", budget=Budget(trials=1))  # fmt: skip
    with pytest.raises(InvalidArgumentError, match="store="):
        whole.run(RayExecutor(1, restart_s=1.0))
