"""inference_mode: detects the cost of autograd, applies, and knows where it is unwanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import build, graph_of, images, inference, mlp

from known_durations import KnownDurations
from slipstream.durations import Timing
from slipstream.durations.microbenchmark import run
from slipstream.errors import WorkloadError
from slipstream.graph import Call, Graph
from slipstream.provenance import Provenance
from slipstream.technique import Context, QualityKind
from slipstream.techniques.inference_mode import InferenceMode
from slipstream.workload import Workload


class Table(KnownDurations):
    """All operators take the same time in a mode."""

    def __init__(self, **nanoseconds: float) -> None:
        self._nanoseconds = nanoseconds

    def lookup(self, call: Call) -> Timing:
        return Timing(self._nanoseconds[call.arguments[0]], 0.01, Provenance.MICROBENCHMARK)


def with_autograd() -> Any:
    """A user-defined step that leaves autograd enabled."""
    model, (x, _), *_ = mlp()
    return {"model": model, "batch": x, "step": lambda: model(x)}


def under_inference_mode() -> Any:
    return build(inference, InferenceMode())


def predicted(graph: Graph, table: Table) -> Graph:
    return InferenceMode().predict(graph, Context(durations=table))  # type: ignore[arg-type]


def total(graph: Graph) -> float:
    return float(graph.tasks.duration_ns.sum() + graph.tasks.gap_ns.sum())


def modes(graph: Graph) -> set[str]:
    return {call.arguments[0] for call in InferenceMode().required_timings(graph)}


def test_autograd_is_detected_from_the_graph() -> None:
    assert modes(graph_of(with_autograd)) == {"grad", "inference"} | (
        modes(graph_of(with_autograd)) & {"no_grad"}
    )
    assert modes(graph_of(inference)) == {"no_grad", "inference"}


def test_every_operator_loses_its_cost_of_autograd() -> None:
    graph = graph_of(with_autograd)
    after = predicted(graph, Table(grad=1500.0, no_grad=1000.0, inference=1000.0))
    traced = after.tasks.duration_ns + after.tasks.gap_ns < (
        graph.tasks.duration_ns + graph.tasks.gap_ns
    )
    assert traced.sum() >= 4
    saved = total(graph) - total(after)
    assert 0 < saved <= 500.0 * traced.sum() + 1e-6
    after.check()


def test_a_step_without_autograd_gains_almost_nothing() -> None:
    graph = graph_of(inference)
    after = predicted(graph, Table(no_grad=1000.0, inference=1000.0))
    assert total(after) == pytest.approx(total(graph))


def test_noise_of_the_wrong_sign_is_not_a_slowdown() -> None:
    graph = graph_of(with_autograd)
    after = predicted(graph, Table(grad=900.0, no_grad=900.0, inference=1000.0))
    assert total(after) == pytest.approx(total(graph))


def test_its_calls_can_be_measured_in_every_mode() -> None:
    calls = InferenceMode().required_timings(graph_of(with_autograd))
    found = run([call.to_json() for call in calls], threads=1)
    assert [timing.get("error") for timing in found] == [None] * len(calls)
    assert all(timing["nanoseconds"] > 0 for timing in found)


def test_the_step_runs_in_inference_mode_with_equal_output() -> None:
    plain, inferring = build(with_autograd), build(with_autograd, InferenceMode())
    output = inferring.step()
    assert output.is_inference()
    assert torch.equal(output, plain.step())
    assert plain.step().requires_grad


def test_a_training_step_needs_autograd() -> None:
    assert "trains" in str(InferenceMode().why_not(graph_of(images)))
    with pytest.raises(WorkloadError, match="trains"):
        build(images, InferenceMode())


def test_a_step_in_inference_mode_reports_it() -> None:
    assert "already" in str(InferenceMode().why_not(graph_of(under_inference_mode)))
    assert InferenceMode().why_not(graph_of(inference)) is None
    assert InferenceMode().why_not(graph_of(with_autograd)) is None


def test_it_changes_no_numerics() -> None:
    assert InferenceMode().quality().kind is QualityKind.EXACT


def test_tensors_saved_by_autograd_are_freed_after_their_last_use() -> None:
    graph = graph_of(with_autograd)
    after = predicted(graph, Table(grad=1.0, no_grad=1.0, inference=1.0))
    ours, real = outliving(after), outliving(graph_of(without_autograd))
    assert len(outliving(graph)) > len(ours)
    assert ours == real
    assert inherited_bytes(after) < inherited_bytes(graph)


def without_autograd() -> Any:
    return build(with_autograd, InferenceMode())


def outliving(graph: Graph) -> list[int]:
    """Sizes of the allocations that the step leaves behind."""
    memory = graph.memory
    return sorted(memory.nbytes[(memory.producer >= 0) & (memory.release < 0)].tolist())


def inherited_bytes(graph: Graph) -> int:
    """Return bytes that exist from the previous step and are freed in this one."""
    memory = graph.memory
    return int(memory.nbytes[(memory.producer < 0) & (memory.release >= 0)].sum())


def test_its_edit_is_one_equivalent_line(tmp_path: Path) -> None:
    path = tmp_path / "serve.py"
    path.write_text(
        "import torch\n\n\ndef make():\n    model = torch.nn.Linear(2, 2)\n"
        "    return model, torch.ones(1, 2)\n"
    )
    change = InferenceMode().code(Workload.parse(f"{path}:make"))
    assert change is not None
    line = "model.forward = torch.inference_mode()(model.forward)"
    assert f"+    {line}" in change.diff
    model = torch.nn.Linear(2, 2)
    exec(line, {"torch": torch, "model": model})
    assert model(torch.ones(1, 2)).is_inference()
