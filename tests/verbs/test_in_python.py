"""Tests of the verbs as Python functions: their reprs, and errors on wrong inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream as ss
from slipstream.errors import InvalidArgumentError
from slipstream.graph import replay
from slipstream.units import format_duration
from slipstream.workload import Workload
from tiny_models import captured, parts


def test_graphs_and_predictions_have_a_short_repr() -> None:
    graph = captured("transformer")
    shown = repr(graph)
    assert f"{len(graph)} tasks" in shown
    assert format_duration(replay(graph).step_ns) in shown
    assert f"{graph.samples} samples" in shown
    (baseline, refused) = ss.predict(graph, [(), "amp:fp16"])
    assert baseline.technique in repr(baseline)
    assert "1.00x" in repr(baseline)
    assert refused.why_not
    assert refused.technique in repr(refused)
    assert refused.why_not[:40] in repr(refused)
    assert all(len(repr(shown)) < 300 for shown in (graph, baseline, refused))


@pytest.mark.parametrize("path", ["a.slipgraph", Path("a.slipgraph")])
@pytest.mark.parametrize(
    "verb",
    [
        lambda path: ss.predict(path, ["amp:bf16"]),
        ss.advise,
        lambda path: ss.write_report(path, Path("r.html")),
    ],
)
def test_refuses_a_path_instead_of_a_graph(verb: Any, path: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        verb(path)
    assert 'ss.load("a.slipgraph")' in (caught.value.remedy or "")
    with pytest.raises(InvalidArgumentError, match=r"\blist\b"):
        verb([])


@pytest.mark.parametrize(
    "verb", [ss.profile, lambda w: ss.apply(w, "amp:bf16"), lambda w: ss.prove(w, ["amp:bf16"])]
)
def test_refuses_a_recording_instead_of_a_workload(verb: Any) -> None:
    for recording in ("a.slipgraph", Path("a.slipgraph")):
        with pytest.raises(InvalidArgumentError) as caught:
            verb(recording)
        assert "recording" in (caught.value.remedy or "")
    with pytest.raises(InvalidArgumentError, match=r"\bGraph\b"):
        verb(captured("mlp"))


def test_live_objects_are_referred_to_workload_of() -> None:
    for live in (torch.nn.Linear(8, 8), lambda: None, (torch.nn.Linear(8, 8), torch.ones(2, 8))):
        with pytest.raises(InvalidArgumentError) as caught:
            ss.profile(live)  # type: ignore[arg-type]
        assert "ss.Workload.of(" in (caught.value.remedy or "")
        assert len(str(caught.value)) < 250, "the whole model is no message"


@pytest.mark.parametrize(
    "verb",
    [
        lambda text: ss.predict(captured("mlp"), text),
        lambda text: ss.prove(Workload.of(*parts("mlp")), text),
    ],
)
def test_refuses_a_string_instead_of_a_list(verb: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="'fused_optimizer'") as caught:
        verb("fused_optimizer")
    assert caught.value.remedy == 'pass ["fused_optimizer"]'
