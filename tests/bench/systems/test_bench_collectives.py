"""``slipstream bench collectives``: the step that it predicts from."""

from __future__ import annotations

from slipstream.graph import StepPhase
from slipstream_bench.systems.collectives import bars as bench


def test_the_step_takes_the_sleep_times_of_its_layers() -> None:
    """Computing counts as a layer's time, and lengthens it only if longer than its sleep."""
    tasks = bench._graph().tasks
    takes_ns = tasks.duration_ns + tasks.gap_ns
    model = bench._MODEL
    for phase, layer_s in (
        (StepPhase.FORWARD, model.forward_s), (StepPhase.BACKWARD, model.backward_s),
    ):  # fmt: skip
        assert takes_ns[tasks.phase == phase].sum() >= model.layers * layer_s * 1e9
