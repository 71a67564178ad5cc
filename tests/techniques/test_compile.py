"""torch.compile, predicted from recorded regions and applied for real."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded import build, graph_of, mlp

from slipstream import technique
from slipstream.durations import Durations
from slipstream.errors import WorkloadError
from slipstream.graph import Graph, replay
from slipstream.provenance import Provenance
from slipstream.technique import Context, QualityKind
from slipstream.techniques.accumulation import Accumulation
from slipstream.techniques.compile import Compile
from slipstream.verbs.predicting import predict
from slipstream.workload import BuiltWorkload, Workload

_FORWARD_NS, _BACKWARD_NS, _OVERHEAD_NS = 1e6, 2e6, 5e5


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A real eager step, with additional regions of round numbers."""
    from slipstream.capture import covered_tasks, max_repeats

    eager = graph_of(mlp)
    covered = covered_tasks(eager, set())
    regions = {
        "mode": "default",
        "samples": eager.samples,
        "regions": [
            {"phase": "forward", "operators": 5, "saved_bytes": 4096, "ns": _FORWARD_NS,
             "spread": 0.01},
            {"phase": "backward", "operators": 9, "saved_bytes": 0, "ns": _BACKWARD_NS,
             "spread": 0.01},
        ],
        "overhead_ns": _OVERHEAD_NS,
        "covered_ns": {p: float(eager.tasks.duration_ns[t].sum()) for p, t in covered.items()},
        "repeats": max_repeats(eager, covered["forward"]),
        "stays": [],
        "breaks": [{"reason": "print", "where": "train.py:3"}],
        "compile_s": 10.0, "cached": False, "eager_ns": 5_000_000, "compiled_ns": 4_000_000,
    }  # fmt: skip
    return replace(eager, meta={**eager.meta, "regions": regions})


def predicted(graph: Graph, *techniques: Any) -> Graph:
    durations = Durations(1, Path("nowhere"))
    return technique.combine(graph, techniques, Context(durations))


def inserted(graph: Graph) -> dict[str, int]:
    names = [graph.string(int(name)) for name in graph.tasks.name]
    expected = ("guards and wrappers", "compiled forward 0", "compiled backward 0")
    return {name: names.index(name) for name in expected}


def with_regions(graph: Graph, **changes: Any) -> Graph:
    recorded: Any = graph.meta["regions"]
    return replace(graph, meta={**graph.meta, "regions": {**recorded, **changes}})


def test_tasks_of_the_model_are_replaced_by_regions(graph: Graph) -> None:
    after = predicted(graph, Compile())
    modules = [after.string(int(module)) for module in after.tasks.module]
    left = [
        after.string(int(name))
        for name, module, scope in zip(after.tasks.name, modules, after.tasks.scope, strict=True)
        if module.startswith("model") and "AccumulateGrad" not in after.string(int(scope))
    ]
    assert left == ["guards and wrappers", "compiled forward 0", "compiled backward 0"]
    names = {after.string(int(name)) for name in after.tasks.name}
    assert any("log_softmax" in name for name in names), "the loss is the user's own"
    place = inserted(after)
    assert after.tasks.duration_ns[place["compiled forward 0"]] == _FORWARD_NS
    assert after.tasks.duration_ns[place["compiled backward 0"]] == _BACKWARD_NS


def test_the_step_is_the_remaining_tasks_and_the_regions(graph: Graph) -> None:
    from slipstream.capture import covered_tasks

    left = np.ones(len(graph), bool)
    left[np.concatenate(list(covered_tasks(graph, set()).values()))] = False
    rest = float((graph.tasks.duration_ns + graph.tasks.gap_ns)[left].sum())
    (found,) = predict(graph, ["compile"])
    expected = rest + _FORWARD_NS + _BACKWARD_NS + _OVERHEAD_NS
    assert found.step_ns == pytest.approx(expected, rel=1e-6)
    assert set(found.shares) == {Provenance.MEASURED, Provenance.MICROBENCHMARK}
    assert found.quality is not None
    assert found.quality.kind is QualityKind.ROUNDING


def test_it_reports_when_compilation_has_paid_off(graph: Graph) -> None:
    (edit,) = predicted(graph, Compile()).edits
    assert re.search(r"\b2\b[^\d]*\b1 graph break\b", edit.what)
    assert "10.0 s" in edit.what
    assert "after 10000 steps" in edit.what
    slower = with_regions(graph, compiled_ns=6_000_000, cached=True)
    (edit,) = predicted(slower, Compile()).edits
    assert re.search(r"\bwarm\b.*\bnever\b", edit.what)


def test_excluded_modules_are_not_compiled(graph: Graph) -> None:
    every = len(predicted(graph, Compile()))
    edited = predicted(with_regions(graph, stays=[["model.2", "aten::addmm"]]), Compile())
    names = [edited.string(int(name)) for name in edited.tasks.name]
    assert names.count("aten::addmm") == 1
    assert len(edited) > every + 1, "its backward stays, too"


def test_several_passes_repeat_regions_and_their_guards(graph: Graph) -> None:
    after = predicted(graph, Accumulation(4), Compile())
    place = inserted(after)
    times = after.tasks.duration_ns
    assert times[place["guards and wrappers"]] == pytest.approx(4 * _OVERHEAD_NS)
    assert times[place["compiled forward 0"]] == pytest.approx(4 * _FORWARD_NS)
    region = place["compiled forward 0"]
    assert after.tasks.provenance[region] == list(Provenance).index(Provenance.ASSUMED)


def test_a_region_saves_what_its_backward_needs(graph: Graph) -> None:
    after = predicted(graph, Compile())
    assert len(graph.memory)
    place = inserted(after)
    own = np.flatnonzero(after.memory.producer == place["compiled forward 0"])
    saved = {(int(after.memory.nbytes[a]), int(after.memory.release[a])) for a in own}
    assert (4096, place["compiled backward 0"]) in saved
    after.check()
    assert replay(after).step_ns > 0


@pytest.mark.parametrize(
    ("mode", "regions", "message"),
    [
        ("default", None, "slipstream advise WORKLOAD --record regions"),
        ("default", {"reason": "no compiler", "remedy": "install g++"}, "no compiler; install g++"),
        ("default", {"reason": "compiled already", "remedy": ""}, "compiled already"),
        ("max_autotune", {"mode": "default"}, "prove measures it"),
        ("reduce_overhead", {"mode": "default"}, "GPU"),
    ],
)
def test_requirements_are_reported(graph: Graph, mode: Any, regions: Any, message: str) -> None:
    meta = {key: value for key, value in graph.meta.items() if key != "regions"}
    if regions is not None:
        meta["regions"] = regions
    reason = Compile(mode).why_not(replace(graph, meta=meta))
    assert reason is not None
    assert reason.endswith(message) or message in reason


def test_it_applies_if_regions_were_recorded(graph: Graph) -> None:
    assert Compile().why_not(graph) is None


def test_real_compiled_steps_give_the_same_parameters() -> None:
    plain, compiled = build(mlp), build(mlp, Compile())
    for _ in range(3):
        plain.step()
        compiled.step()
    for ours, theirs in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        compiled.step()
    names = {event.name for event in profiler.events()}
    assert "CompiledFunction" in names
    assert "aten::linear" not in names


def test_a_hidden_model_cannot_be_compiled() -> None:
    with pytest.raises(WorkloadError, match="needs the model"):
        Compile().apply(BuiltWorkload(None, step=lambda: None))


def test_the_edit_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "from torch import nn, optim, randn\n\n\ndef make():\n    model = nn.Linear(2, 1)\n"
        "    return model, randn(3, 2), None, optim.SGD(model.parameters())\n"
    )
    change = Compile().code(Workload.parse(f"{path}:make"))
    assert change is not None
    added = [line for line in change.diff.splitlines() if line.startswith("+")]
    assert "+    model = torch.compile(model)" in added
    change = Compile("max_autotune").code(Workload.parse(f"{path}:make"))
    assert change is not None
    assert 'torch.compile(model, mode="max-autotune")' in change.diff
    assert not change.note
    path.write_text(path.read_text() + "\n\ndef save(model):\n    return model.state_dict()\n")
    change = Compile().code(Workload.parse(f"{path}:make"))
    assert change is not None
    assert "model._orig_mod" in change.note
