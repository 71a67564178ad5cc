"""Durations of tasks whose call changes: times a ratio, or plus the added arithmetic."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from known_durations import KnownDurations
from slipstream.durations import Durations, Timing, rescale
from slipstream.graph import PROVENANCES, Call, Editor, TensorSpec, replace_tasks
from slipstream.provenance import Provenance
from small_graphs import graph_of

RECORDED_NS = 80.0
FULL, HALF = "float32", "bfloat16"


class Alone(KnownDurations):
    """Durations of calls in ns, by the dtype and rows of their first input."""

    def __init__(self, **durations: float) -> None:
        self._took = durations

    def lookup(self, call: Any) -> Timing | None:
        first = call.inputs[0]
        duration = self._took.get(f"{first.dtype}_{first.shape[0]}")
        return None if duration is None else Timing(duration, 0.1, Provenance.MICROBENCHMARK)


def product(dtype: str, rows: int = 8) -> Call:
    left, right = TensorSpec(dtype, (rows, 4), (4, 1)), TensorSpec(dtype, (4, 4), (4, 1))
    op = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
    return Call(op, (left, right), (TensorSpec(dtype, (rows, 4), (4, 1)),))


def rescaled(new: Call, **alone: float) -> tuple[float, float, Provenance]:
    """Return duration, spread and provenance of a task of `RECORDED_NS` that becomes `new`."""
    graph = graph_of([(0, RECORDED_NS, 0.0)], calls=(product(FULL),))
    graph = replace_tasks(graph, call=np.zeros(1, np.int32))
    edit = Editor(graph, "another")
    rescale(edit, graph, {0: new}, cast("Durations", Alone(**alone)))
    after = edit.apply("made another call").tasks
    return (
        float(after.duration_ns[0]), float(after.spread[0]), PROVENANCES[after.provenance[0]],
    )  # fmt: skip


def test_a_shorter_call_takes_its_share_of_the_recorded_time() -> None:
    duration, spread, provenance = rescaled(product(HALF), float32_8=100.0, bfloat16_8=50.0)
    assert duration == pytest.approx(RECORDED_NS * 0.5)
    assert spread == pytest.approx(0.1 * 2**0.5)
    assert provenance is Provenance.MICROBENCHMARK


def test_a_call_with_more_arithmetic_on_less_memory_adds_the_difference() -> None:
    # The 20 ns that its cached operands saved in the step are saved once, not seventy times.
    duration, spread, provenance = rescaled(product(HALF), float32_8=100.0, bfloat16_8=7000.0)
    assert duration == pytest.approx(RECORDED_NS + 6900.0)
    assert spread == pytest.approx(0.1 * 2**0.5)
    assert provenance is Provenance.MICROBENCHMARK


def test_a_call_on_more_memory_takes_its_multiple() -> None:
    duration, _, _ = rescaled(product(FULL, rows=16), float32_8=100.0, float32_16=190.0)
    assert duration == pytest.approx(RECORDED_NS * 1.9)


def test_an_unknown_call_keeps_its_time() -> None:
    duration, _, provenance = rescaled(product(HALF), float32_8=100.0)
    assert (duration, provenance) == (RECORDED_NS, Provenance.ASSUMED)
