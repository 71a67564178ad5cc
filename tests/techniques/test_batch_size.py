"""batch_size predicts the calls and memory of a real step of that many samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded import build, cannot_be_timed, graph_of, inference, mlp
from torch import nn
from torch.nn import functional

from known_durations import context_for
from slipstream.durations import Durations
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Editor, Graph, StepPhase, replay
from slipstream.graph.graph import replace_tasks
from slipstream.provenance import Provenance
from slipstream.technique import Context, QualityKind, combine, parse
from slipstream.techniques.batch_size import BatchSize
from slipstream.workload import Workload, build_from
from tiny_models import MODELS, loss

_WORDS, _LENGTH = 53, 10


def workload(name: str, samples: int) -> Any:
    """One of the tiny models, trained on a batch of `samples`."""
    torch.manual_seed(0)
    model = MODELS[name]()
    if name == "mlp":
        batch = (torch.randn(samples, 12), torch.randint(0, 4, (samples,)))
    elif name == "conv":
        batch = (torch.randn(samples, 3, 8, 8), torch.randint(0, 4, (samples,)))
    else:
        # Input format of language models: inputs are a view, targets are flattened.
        words = torch.randint(0, _WORDS, (samples, _LENGTH + 1))
        batch = (words[:, :-1][:, :_LENGTH], words[:, 1:].reshape(-1))
    return model, batch, loss, torch.optim.Adam(model.parameters(), 1e-3)


@functools.cache
def made(name: str, samples: int) -> Callable[[], Any]:
    """`graph_of` caches by function."""
    make = functools.partial(workload, name, samples)
    functools.update_wrapper(make, workload)
    return make


def recorded(name: str, samples: int) -> Graph:
    return graph_of(made(name, samples))


def unmeasured(tmp_path: Path) -> Context:
    return Context(Durations(threads=1, path=tmp_path / "durations.db"))


@pytest.mark.parametrize("target", [9, 16])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_calls_equal_those_of_a_real_step_of_that_size(
    name: str, target: int, tmp_path: Path
) -> None:
    graph, real = recorded(name, 8), recorded(name, target)
    found = BatchSize(str(target)).predict(graph, unmeasured(tmp_path))
    found.check()
    assert found.samples == target
    assert tensors_and_numbers(found) == tensors_and_numbers(real)


def tensors_and_numbers(graph: Graph) -> list[Any]:
    """Return operator, arguments and outputs of every task.

    Workspaces of oneDNN are left out, and step sizes of the optimizer, which depend on the number
    of earlier steps.
    """

    def comparable(value: Any) -> Any:
        if isinstance(value, tuple):
            return [comparable(item) for item in value if getattr(item, "dtype", "") != "uint8"]
        return None if isinstance(value, float) else value

    calls = [graph.calls[number] for number in graph.tasks.call[1:]]
    return [(call.op, comparable(call.arguments), comparable(call.outputs)) for call in calls]


def test_a_buffer_of_unknown_size_is_never_too_short(tmp_path: Path) -> None:
    for target in (9, 16):
        found = BatchSize(str(target)).predict(recorded("lstm", 8), unmeasured(tmp_path))
        ours, theirs = (
            [call.inputs[-1].numel for call in graph.calls if "rnn_layer_backward" in call.op]
            for graph in (found, recorded("lstm", target))
        )
        assert ours
        assert all(value >= another for value, another in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_memory_equals_that_of_a_real_step_of_that_size(name: str, tmp_path: Path) -> None:
    graph = recorded(name, 8)
    found = BatchSize("x2").predict(graph, unmeasured(tmp_path))
    real = replay(recorded(name, 16)).peak_bytes
    assert real > replay(graph).peak_bytes
    # oneDNN's workspaces are whole pages, which is a lot at this size.
    error = 0.08 if name == "lstm" else 0.01
    assert replay(found).peak_bytes == pytest.approx(real, rel=error)


def test_scaling_there_and_back_restores_the_step(tmp_path: Path) -> None:
    graph, context = recorded("transformer", 8), unmeasured(tmp_path)
    back = BatchSize("8").predict(BatchSize("x3").predict(graph, context), context)
    assert (back.calls, back.shrunk, back.meta) == (graph.calls, graph.shrunk, graph.meta)
    assert back.samples == graph.samples
    assert back.memory.nbytes.tolist() == pytest.approx(graph.memory.nbytes.tolist(), abs=2)


def test_measured_operators_follow_the_ratio_of_benchmarks_and_others_stay() -> None:
    graph, technique = graph_of(mlp), BatchSize("x64")
    context = context_for(technique, graph)
    durations = context.durations
    after = technique.predict(graph, context)
    assert after.tasks.gap_ns.tolist() == graph.tasks.gap_ns.tolist()
    for t, (old, new) in enumerate(zip(graph.tasks.call, after.tasks.call, strict=True)):
        ratio = after.tasks.duration_ns[t] / max(graph.tasks.duration_ns[t], 1.0)
        if old < 0 or graph.tasks.phase[t] == StepPhase.OPTIMIZER:
            assert ratio in (0, 1)
            continue
        first, other = (durations.lookup(g.calls[c]) for g, c in ((graph, old), (after, new)))
        if graph.calls[old] != after.calls[new] and first and other:
            assert ratio == pytest.approx(other.nanoseconds / first.nanoseconds)
    products = [t for t, c in enumerate(after.tasks.call) if "mm(" in after.calls[c].op and c >= 0]
    assert (after.tasks.duration_ns[products] > 1.5 * graph.tasks.duration_ns[products]).any()


def test_requested_calls_can_be_timed() -> None:
    assert cannot_be_timed(BatchSize("x3").required_timings(graph_of(mlp))) == []


def test_calls_that_cannot_be_benchmarked_scale_with_their_bytes(tmp_path: Path) -> None:
    # So short a call may have no time without the profiler's overhead: set all durations.
    graph = graph_of(inference)
    graph = replace_tasks(graph, duration_ns=np.full(len(graph.tasks), 1000.0))
    after = BatchSize("x3").predict(graph, unmeasured(tmp_path))
    (task,) = [t for t, c in enumerate(graph.tasks.call) if "addmm" in graph.calls[c].op and c >= 0]
    weight = 8 * 8 + 8
    expected = (weight + 2 * 12 * 8) / (weight + 2 * 4 * 8)
    ratio = after.tasks.duration_ns[task] / graph.tasks.duration_ns[task]
    assert ratio == pytest.approx(expected)
    assert list(Provenance)[after.tasks.provenance[task]] is Provenance.ASSUMED


def test_a_call_of_another_edit_is_assumed_to_scale_with_the_samples(tmp_path: Path) -> None:
    graph = graph_of(inference)
    edit = Editor(graph, "by hand")
    edit.insert(1, "extra", 100.0, Provenance.MEASURED, call=graph.calls[0])
    after = BatchSize("x3").predict(edit.apply("one more"), unmeasured(tmp_path))
    assert after.tasks.duration_ns[2] == pytest.approx(300.0)


def test_it_precedes_techniques_that_change_operators(tmp_path: Path) -> None:
    graph, context = recorded("transformer", 8), unmeasured(tmp_path)
    both = parse("amp:bf16+batch_size:x2")
    assert [technique.name for technique in both] == ["batch_size", "amp"]
    after = combine(graph, both, context)
    after.check()
    assert after.samples == 16


def test_applied_it_gives_steps_of_that_many_samples() -> None:
    assert build(mlp, BatchSize("x3")).batch[0].shape == (24, 16)
    fewer = build(mlp, BatchSize("2"))
    assert fewer.samples == 2
    assert fewer.step().isfinite()


def test_the_same_samples_twice_have_the_loss_of_once() -> None:
    torch.testing.assert_close(build(mlp).step(), build(mlp, BatchSize("x2")).step())


@pytest.mark.parametrize(
    "setting", ["0", "x0", "-4", "2.5", "many", "x", "x-1", "", "٣", "20000000"]
)
def test_invalid_sizes_are_refused(setting: str) -> None:
    with pytest.raises(InvalidArgumentError, match="neither a number"):
        BatchSize(setting)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("x1", "8 samples already"),
        ("8", "8 samples already"),
        ("x0.3", "0.3 times 8 samples"),
        ("x2", None),
        ("x0.5", None),
        ("x1.5", None),
        ("5", None),
    ],
)
def test_impossible_sizes_are_reported(setting: str, reason: str | None) -> None:
    found = BatchSize(setting).why_not(graph_of(mlp))
    assert found is None if reason is None else reason in str(found)


def test_a_fraction_of_a_sample_cannot_be_applied() -> None:
    with pytest.raises(WorkloadError, match=r"0\.3 times 8"):
        build(mlp, BatchSize("x0.3"))


class Fixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x.view(4, 2))


def test_the_reason_of_the_profile_is_passed_on() -> None:
    def fixed() -> Any:
        return Fixed(), torch.randn(4, 2)

    assert "2 samples" in str(BatchSize().why_not(graph_of(fixed)))


def test_a_profile_without_a_second_size_is_distinguished_from_one_with() -> None:
    graph = graph_of(mlp)
    for changes in (
        {"shrunk": (), "meta": {}},
        {"samples": 0},
        {"meta": {}},
        {"meta": {"shrunk": [1]}},
        {"meta": {"shrunk": {"samples": "many", "of": None}}},
        {"meta": {"shrunk": {"samples": 8, "of": 8}}},
    ):
        assert "profile it again" in str(BatchSize().why_not(replace(graph, **changes)))


def test_calls_that_do_not_fit_into_memory_are_not_benchmarked() -> None:
    graph = graph_of(mlp)
    assert BatchSize("x2").required_timings(graph)
    assert BatchSize("x10000000").required_timings(graph) == []


def test_the_literal_of_the_size_is_multiplied(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def make_workload(width=3, batch_size = 6):  # samples\n    return None\n")
    recipe = Workload.parse(f"{path}:make_workload")
    for samples, target in (("x2", 12), ("x0.5", 3)):
        found = BatchSize(samples).code(recipe)
        assert found is not None
        assert f"+def make_workload(width=3, batch_size = {target}):  # samples" in found.diff


def test_without_a_certain_place_the_lines_to_write_have_the_number(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def make_workload(batch_size=6):\n    return None\n")
    target = f"{path}:make_workload"
    for samples, arguments, reason, line in (
        ("64", {}, "file", "batch_size=64)"),
        ("x0.25", {}, "0.25 times 6", "batch_size=0.25 * N)"),
        ("x2", {"batch_size": 8}, "batch_size", "batch_size=2 * N)"),
    ):
        found = BatchSize(samples).code(Workload.parse(target, **arguments))
        assert found is not None
        assert found.diff == ""
        assert reason in found.note
        assert line in found.note


def test_training_must_follow_the_size_and_inference_need_not() -> None:
    assert BatchSize().quality(graph_of(mlp)).kind is QualityKind.NEEDS_TRAINING
    assert BatchSize().quality(graph_of(inference)).kind is QualityKind.EXACT


def test_a_step_built_from_parts_is_preserved() -> None:
    built = build_from({"step": lambda: None, "batch": torch.ones(4, 2)}, (), 0, "own")
    with pytest.raises(WorkloadError, match="hides its batch"):
        BatchSize().apply(built)
