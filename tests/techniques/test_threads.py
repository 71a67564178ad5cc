"""threads: operators are scaled by their own ratio, gaps stay, both sides use one clock."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from recorded import build, graph_of, mlp

from slipstream import technique
from slipstream.durations import Durations, Timing, TimingRequest
from slipstream.errors import InvalidArgumentError
from slipstream.graph import Call, Graph
from slipstream.provenance import Provenance
from slipstream.technique import Context
from slipstream.techniques import threads
from slipstream.techniques.threads import Threads
from slipstream.verbs.predicting import predict
from slipstream.workload import Workload


class Known(Durations):
    """Matmuls take a `factor`-th of the time on two threads, everything else as long."""

    def __init__(self, path: Path, factor: float = 1.6, spread: float = 0.01) -> None:
        super().__init__(1, path / "durations.db")
        self.factor, self.spread = factor, spread
        self.asked: list[TimingRequest] = []

    def lookup(self, call: Call | TimingRequest) -> Timing | None:
        assert isinstance(call, TimingRequest)
        self.asked.append(call)
        gain = self.factor if call.threads == 2 and call.call.name.endswith("mm") else 1.0
        return Timing(1000.0 / gain, self.spread, Provenance.MICROBENCHMARK)

    def measure(self, calls: object, *others: object, **how: object) -> None:
        """All durations are known."""


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)


def names(graph: Graph) -> list[str]:
    return [graph.string(int(name)) for name in graph.tasks.name]


def test_operators_scale_by_their_own_ratio_and_gaps_do_not(tmp_path: Path) -> None:
    graph = graph_of(mlp)
    after = Threads().predict(graph, Context(Known(tmp_path)))
    product = np.array([name.endswith("mm") for name in names(graph)])
    assert product.any()
    before = graph.tasks.duration_ns
    expected = np.where(product, before / 1.6, before)
    np.testing.assert_allclose(after.tasks.duration_ns, expected)
    np.testing.assert_array_equal(after.tasks.gap_ns, graph.tasks.gap_ns)


def test_both_sides_are_timed_by_the_wall_clock(tmp_path: Path) -> None:
    durations = Known(tmp_path)
    Threads(2).predict(graph_of(mlp), Context(durations))
    calls = Threads(2).required_timings(graph_of(mlp))
    assert {question.threads for question in calls} == {1, 2}
    assert all(question.wall for question in calls)
    assert set(durations.asked) == set(calls)
    # Neighbours are measured alternately: both sides of each operator are adjacent.
    assert all(
        question.call == other.call for question, other in zip(calls[::2], calls[1::2], strict=True)
    )


def test_contention_widens_the_whole_interval(tmp_path: Path) -> None:
    calm, busy = (
        predict(graph_of(mlp), ["threads:2"], durations=Known(tmp_path, spread=spread))[0]
        for spread in (0.01, 0.4)
    )
    assert calm.ratio == busy.ratio
    assert busy.high / busy.low > 1.3 * calm.high / calm.low


def test_a_call_that_cannot_be_timed_keeps_its_time_and_is_reported(tmp_path: Path) -> None:
    after = Threads(2).predict(graph_of(mlp), Context(Durations(1, tmp_path / "none.db")))
    np.testing.assert_array_equal(after.tasks.duration_ns, graph_of(mlp).tasks.duration_ns)
    assert after.edits[-1].what == "0 operators on 2 threads"


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(mlp)
    assert Threads().why_not(graph) is None
    assert "already" in (Threads(1).why_not(graph) or "")
    assert "2 cores" in (Threads(3).why_not(graph) or "")
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)
    assert "one core" in (Threads().why_not(graph) or "")
    with pytest.raises(InvalidArgumentError, match="negative"):
        Threads(-1)


def test_applied_it_is_torchs_own_setting() -> None:
    before = torch.get_num_threads()
    try:
        plain = build(mlp).step()
        threaded = build(mlp, Threads(2))
        assert torch.get_num_threads() == 2
        torch.testing.assert_close(threaded.step(), plain)
    finally:
        torch.set_num_threads(before)


def test_the_source_edit_is_equivalent(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n\nmodel = torch.nn.Linear(2, 2)\n")
    change = Threads(2).code(Workload.parse(str(script)))
    assert change is not None
    assert "+torch.set_num_threads(2)" in change.diff


def test_the_name_has_the_number_of_threads_that_zero_represents() -> None:
    # The number of cores; two here.
    (parsed,) = technique.parse("threads:0")
    assert str(parsed) == "threads:2"
    assert technique.parse(str(parsed)) == technique.parse("threads:2")
