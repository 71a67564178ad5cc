"""Predictions edit arrays: the number of Python calls does not grow with the tasks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.graph import Graph
from slipstream.provenance import Provenance
from slipstream.technique import parse
from slipstream_bench.systems.report import repeated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recorded import graph_of, images, mlp

from known_durations import context_for, timed_by_bytes


def wide() -> Any:
    """Tensors large enough that kernels are fused."""
    model, (inputs, targets), loss, optimizer = mlp()
    return model, (inputs.repeat(128, 1), targets.repeat(128)), loss, optimizer


def python_calls(technique: Any, graph: Graph) -> int:
    """Return the Python functions that a toggle calls once the technique has seen the graph."""
    assert technique.why_not(graph) is None
    context = context_for(technique, graph)
    technique.predict(graph, context)
    count = 0

    def profiler(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        technique.why_not(graph)
        technique.required_timings(graph)
        technique.predict(graph, context)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("channels_last", images), ("batch_size:x2", mlp), ("ensemble:8", mlp),
        ("ensemble:8,weights=shared", images), ("fusion", wide), ("lowrank:0.25,ends=true", mlp),
        ("lowrank:0.25,ends=true", images), ("quadratic", images),
    ],
)  # fmt: skip
def test_a_toggle_calls_as_many_functions_on_a_larger_step(text: str, make: Any) -> None:
    (technique,) = parse(text)
    graph = timed_by_bytes(graph_of(make))
    few, many = (python_calls(technique, repeated(graph, times)) for times in (4, 24))
    assert many - few < len(graph)  # one call per added task would be 20 times as many


def test_a_repeated_task_is_scaled_by_each_of_its_factors() -> None:
    graph = graph_of(mlp)
    edit = graph.what_if()
    edit.scale(np.array([3, 5, 3]), [2.0, 7.0, 3.0], Provenance.USER)
    factor = np.ones(len(graph))
    factor[[3, 5]] = 6.0, 7.0
    np.testing.assert_array_equal(
        edit.apply("").tasks.duration_ns, graph.tasks.duration_ns * factor
    )
