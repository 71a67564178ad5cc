"""Tasks with decoded columns, and the cost of known and unknown calls."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.durations import Timing
from slipstream.errors import GraphError
from slipstream.graph import (
    UNKNOWN_SPREAD,
    Call,
    Editor,
    Kind,
    Price,
    StepPhase,
    TensorSpec,
    calls_of,
    price,
    price_columns,
)
from slipstream.provenance import Provenance
from small_graphs import graph_of
from tiny_models import captured

SPEC = TensorSpec("float32", (4,), (1,))
SINE = Call("aten::sin(Tensor self) -> Tensor", (SPEC,), (SPEC,))
COSINE = Call("aten::cos(Tensor self) -> Tensor", (SPEC,), (SPEC,))
MICRO = Provenance.MICROBENCHMARK


class Table:
    """Knows only the sine."""

    def lookup(self, call: Call) -> Timing | None:
        return Timing(100.0, 0.1, MICRO) if call.name == "aten::sin" else None


def test_a_view_matches_the_columns() -> None:
    graph = captured("mlp")
    tasks = graph.tasks
    for number in range(len(graph)):
        task = graph.task(number)
        assert task.name == graph.strings[tasks.name[number]]
        assert task.module == graph.texts("module")[number]
        assert (task.scope, task.source) == (
            graph.strings[tasks.scope[number]],
            graph.strings[tasks.source[number]],
        )
        assert (task.kind, task.phase) == (Kind(tasks.kind[number]), StepPhase(tasks.phase[number]))
        assert task.duration_ns == tasks.duration_ns[number]
        inputs, outputs = task.operands
        if task.call is None:
            assert (inputs, outputs) == ([], [])
        else:
            assert task.known_call is task.call
            assert inputs + outputs == task.storages == graph.storages(number).tolist()
            assert len(inputs) == len(task.call.inputs)
    chosen = np.flatnonzero(tasks.call >= 0)
    assert calls_of(graph, chosen.tolist()) == [graph.calls[n] for n in tasks.call[chosen]]
    assert graph.texts("name", chosen) == [graph.task(int(t)).name for t in chosen]


def test_an_unknown_call_is_an_error_that_names_the_task() -> None:
    graph = graph_of([(0, 1, 0)])
    assert graph.task(0).call is None
    with pytest.raises(GraphError, match=r"arguments of task 0 \(task 0\)"):
        calls_of(graph, [0])


def test_a_known_call_costs_its_benchmark_at_the_pace_of_the_step() -> None:
    assert price(Table(), SINE, 7.0, pace=1.5) == Price(150.0, 0.1, MICRO)
    assert price(Table(), [SINE, SINE], 7.0) == Price(200.0, 0.1, MICRO)


def test_an_unknown_call_has_an_assumed_cost() -> None:
    assert price(Table(), COSINE, 7.0, pace=3.0) == Price(7.0, UNKNOWN_SPREAD, Provenance.ASSUMED)
    several = price(Table(), [SINE, COSINE], 7.0, spread=1.0)
    assert several == Price(7.0, 1.0, Provenance.ASSUMED)


def test_an_edit_takes_prices() -> None:
    graph = graph_of([(0, 10, 1)])
    edit = Editor(graph, "price")
    edit.set_price(0, Price(5.0, 0.2, MICRO))
    edit.put(0, SINE, price(Table(), SINE, 0.0), gap_ns=3.0)
    edited = edit.apply("a sine behind it")
    duration_ns, code, spread = price_columns([Price(5.0, 0.2, MICRO), price(Table(), SINE, 0.0)])
    np.testing.assert_array_equal(edited.tasks.duration_ns, duration_ns)
    np.testing.assert_array_equal(edited.tasks.provenance, code)
    np.testing.assert_array_equal(edited.tasks.spread, spread)
    assert (edited.task(1).name, edited.task(1).call) == ("aten::sin", SINE)
