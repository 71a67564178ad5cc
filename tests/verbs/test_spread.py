"""Tests of scaling curves, gradient compression and training runs."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.dom.minidom
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from slipstream import technique
from slipstream.cluster import Cluster, Collective
from slipstream.errors import InvalidArgumentError, SlipstreamError, UsageError
from slipstream.graph import Editor, Graph, Work, replace_exchange
from slipstream.provenance import Provenance
from slipstream.report.curve import curve_svg
from slipstream.technique import Quality, QualityKind, Stage, TechniqueSettings, Traits
from slipstream.verbs.scaling import PARTS, curve
from slipstream.verbs.spreading import at_bandwidth, crossover, spread
from slipstream.verbs.walls import RunWall, TrainingPlan
from slipstream_bench.systems.scale.training_run import Pace, RunTime
from small_steps import FAST, SLOW, Copies, graph_of, shared

DURATIONS: Any = Copies()
SWITCH = Cluster.load("workers=64,link=100mbit,latency=20us")


@dataclass(frozen=True)
class Tenth(TechniqueSettings):
    """A tenth of the bytes, for `cost_us` of encoding."""

    cost_us: float = 100.0
    name: ClassVar[str] = "tenth"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.DISTRIBUTION + 1, replicas="uses", hook="occupies", compresses=True
    )

    def why_not(self, graph: Graph, workload: Any = None) -> str | None:
        return None if graph.exchanges else "nothing is sent"

    def required_timings(self, graph: Graph) -> list[Any]:
        return []

    def predict(self, graph: Graph, context: Any) -> Graph:
        edit = Editor(graph, str(self))
        for row in graph.exchanges:
            less = dataclasses.replace(row.collective, nbytes=row.collective.nbytes / 10)
            work = [Work("encode", self.cost_us * 1e3, Provenance.ASSUMED)]
            replace_exchange(
                edit, row, context.cluster, encode=work, transfers=[less], decode=()
            )  # fmt: skip
        return edit.apply("a tenth")

    def apply(self, built: Any) -> None:
        raise NotImplementedError

    def quality(self, graph: Any = None) -> Quality:
        return Quality(QualityKind.NEEDS_TRAINING, "less is sent")

    def code(self, workload: Any) -> None:
        return None


@pytest.fixture
def tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers one compression method and no other."""
    registered = {
        name: kind for name, kind in technique.registry().items() if not kind.traits.compresses
    }
    monkeypatch.setattr(technique, "registry", lambda: {**registered, "tenth": Tenth})


@pytest.fixture(scope="module")
def transformer() -> Graph:
    return graph_of("transformer")


def test_communication_grows_with_the_workers(transformer: Graph) -> None:
    points = curve(transformer, SWITCH, [2, 8, 64], durations=DURATIONS).points
    assert [p.workers for p in points] == [2, 8, 64]
    efficiency = [p.efficiency for p in points]
    assert efficiency == sorted(efficiency, reverse=True)
    for p in points:
        assert sum(p.parts_ns.values()) == pytest.approx(p.prediction.step_ns)
        assert tuple(p.parts_ns) == PARTS
        assert p.prediction.samples[1] == p.workers * transformer.samples
    communication = [p.parts_ns["latency"] + p.parts_ns["bandwidth"] for p in points]
    assert communication == sorted(communication)


def test_the_curve_draws_every_bar(transformer: Graph) -> None:
    points = curve(transformer, SWITCH, [2, 4], text="fsdp:stage=2", durations=DURATIONS).points
    svg = curve_svg("a <b>", [(str(p.workers), p.parts_ns, "wall") for p in points], PARTS)
    drawn = xml.dom.minidom.parseString(svg)
    occurring = [part for part in PARTS if any(p.parts_ns[part] > 0 for p in points)]
    assert len(drawn.getElementsByTagName("rect")) == len(occurring) * (2 + 1)
    heights = [float(r.getAttribute("height")) for r in drawn.getElementsByTagName("rect")]
    for first in (0, len(occurring)):
        assert sum(heights[first : first + len(occurring)]) == pytest.approx(240, abs=1)


@pytest.mark.parametrize(
    ("workers", "batch", "message"),
    [([], 0, "is empty"), ([128], 0, r"\b128\b.*\b64\b"), ([8], 12, r"\b12\b.*\b8\b")],
)
def test_refuses_invalid_workers_and_batches(
    transformer: Graph, workers: list[int], batch: int, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        curve(transformer, SWITCH, workers, global_batch=batch, durations=DURATIONS)


def test_a_technique_for_one_machine_has_no_curve(transformer: Graph) -> None:
    with pytest.raises(UsageError, match="does not distribute"):
        curve(transformer, SWITCH, [2], text="amp:bf16", durations=DURATIONS)


def test_bandwidth_changes_only_transfer_times(transformer: Graph) -> None:
    made = shared(transformer, SLOW)
    (row,) = made.exchanges
    twice = at_bandwidth(made, 2.0)
    cost = Cluster.load("workers=8,link=2mbit,latency=1ms").cost(row.collective)
    assert twice.tasks.duration_ns[row.task] == pytest.approx(cost.duration_ns)
    assert at_bandwidth(made, math.inf).tasks.duration_ns[row.task] == row.latency_ns
    with pytest.raises(InvalidArgumentError):
        at_bandwidth(made, 0.0)


@pytest.mark.usefixtures("tenth")
def test_compression_is_worth_it_below_the_crossover(
    transformer: Graph,
) -> None:
    found = spread(transformer, SLOW, 4, durations=DURATIONS).compressing
    assert found is not None
    (method,) = found.methods
    assert found.best is method
    made = shared(transformer, SLOW)
    (row,) = made.exchanges
    # One fully exposed bucket: compression saves 9/10 of its transfer and costs 100 us.
    sent_ns = made.tasks.duration_ns[row.task] - row.latency_ns
    assert found.bandwidth == pytest.approx(row.sent_bytes / sent_ns * 1e9)
    assert method.pays_below == pytest.approx(found.bandwidth * 0.9 * sent_ns / 100e3, rel=1e-3)
    assert found.budget_ns == pytest.approx(sent_ns, rel=1e-6)
    text = " ".join(found.in_words)
    assert re.search(r"\bYes\b.*ddp:4\+tenth:100\.0\b.*\b[\d.]+ [GM]bit/s", text)


@pytest.mark.usefixtures("tenth")
def test_compression_is_useless_if_communication_is_hidden(transformer: Graph) -> None:
    found = spread(transformer, FAST, 4, durations=DURATIONS).compressing
    assert found is not None
    assert found.best is None
    assert found.needed == 1.0
    assert re.search(r"\bNo\b.*\bhidden\b", found.in_words[0])


def test_a_graph_never_beats_itself(transformer: Graph) -> None:
    made = shared(transformer, SLOW)
    assert crossover(made, made) == 0.0


@pytest.mark.usefixtures("tenth")
def test_every_way_to_spread_is_ranked(transformer: Graph) -> None:
    found = spread(transformer, SLOW, 8, durations=DURATIONS)
    applying = [p for p in found.predictions if p.why_not is None]
    assert [p.ratio for p in applying] == sorted(p.ratio for p in applying)
    names = {p.technique.partition(":")[0] for p in applying}
    assert names == {"adasum", "ddp", "fsdp", "priority_sync"}
    shown = {p.technique for p in found.predictions}
    assert shown >= {"ddp:8+sharded_update", "ddp:8+two_d_allreduce:0", "fsdp:8,stage=2", "fsdp:8"}
    assert not {p.technique for p in found.predictions if "adasum" in p.technique} - {"adasum:8"}
    with pytest.raises(InvalidArgumentError, match=r":workers: 9\b.*\b8\b"):
        spread(transformer, SLOW, 9, durations=DURATIONS)


def test_a_pace_extrapolates_to_other_numbers_of_chips() -> None:
    small = Cluster.load("tpu-v4-pod", dims=[2, 2, 4])
    large = Cluster.load("tpu-v4-pod", dims=[8, 8, 8])
    pace = Pace.of(small, 73.61e6, 2048, 102e6)
    again = pace.step(small, 2048)
    assert sum(again.values()) == pytest.approx(73.61e6)
    step = pace.step(large, 8192)
    assert step["compute"] == pytest.approx(again["compute"] * (8192 / 512) / (2048 / 16))
    assert step["all-reduce"] == large.cost(Collective("all_reduce", 102e6)).duration_ns
    with pytest.raises(InvalidArgumentError, match=r"\b256\b.*\b512\b"):
        pace.step(large, 256)
    with pytest.raises(InvalidArgumentError, match="all-reduce"):
        Pace.of(small, 1.0, 2048, 102e6)
    with pytest.raises(InvalidArgumentError):
        Pace.of(small, 1e6, 0, 1.0)


def test_a_run_names_its_wall() -> None:
    run = RunTime.of({"compute": 10.0, "all-reduce": 2.0}, 100, evaluation_tail=1300.0)
    assert run.total_ns == 2500.0
    assert run.wall == "evaluation tail"
    assert RunTime.of({"compute": 10.0}, 100, evaluation_tail=10.0).wall == "compute"
    with pytest.raises(InvalidArgumentError, match="evaluation tail"):
        RunTime.of({"compute": 1.0}, 1, evaluation_tail=float("nan"))


def test_every_wall_has_a_remedy_and_its_gain(transformer: Graph) -> None:
    plan = TrainingPlan(
        samples=64e3, evaluations=4, evaluation_ns=8e9, metric_ns=1e9, startup_ns=5e9, load_ns=1e7,
        spread=0.0,
    )  # fmt: skip
    points = curve(transformer, SWITCH, [4, 8], plan=plan, durations=DURATIONS).points
    p = points[-1].prediction
    steps = 64e3 / p.samples[1]
    found = {wall.name: wall for wall in points[-1].walls}
    assert len(found) == 7
    assert [w.ns for w in points[-1].walls] == sorted((w.ns for w in found.values()), reverse=True)
    assert found["evaluation"].ns == pytest.approx(4 * 9e9 / steps)
    # All eight workers evaluate; only the last metric is awaited.
    assert found["evaluation"].saved_ns == pytest.approx((4 * 9e9 - 4 * 1e9 - 1e9) / steps)
    assert found["input"].ns == pytest.approx(transformer.samples * 1e7 - p.step_ns)
    assert found["start-up"].ns == pytest.approx(5e9 / steps)
    parts = points[-1].parts_ns
    assert found["all-reduce"].ns == pytest.approx(parts["latency"] + parts["bandwidth"])
    assert found["update"].remedy == "sharded_update"
    assert points[-1].run_parts_ns["evaluation"] == found["evaluation"].ns
    unknown = curve(transformer, SWITCH, [4], durations=DURATIONS).points[0].walls[-3:]
    assert {(wall.name, wall.ns) for wall in unknown} == {
        ("evaluation", None), ("input", None), ("start-up", None)
    }  # fmt: skip
    assert all("--run" in wall.detail for wall in unknown)
    # No number of loaders suffices.
    slow = TrainingPlan(load_ns=1e15)
    walls = curve(transformer, SWITCH, [4], plan=slow, durations=DURATIONS).points[0].walls
    assert next(w for w in walls if w.name == "input").remedy.startswith("store decoded samples")


def test_a_fixed_batch_costs_what_small_shares_take_longer(transformer: Graph) -> None:
    (point,) = curve(transformer, SWITCH, [4], global_batch=12, durations=DURATIONS).points
    (wall,) = (wall for wall in point.walls if wall.name == "fixed batch")
    assert isinstance(wall, RunWall)
    # As many samples per worker as recorded lose only what the exchange adds.
    assert wall.ns == pytest.approx(0.0, abs=0.1 * point.prediction.step_ns)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sample=3", "'sample'"),
        ("samples=many", "'many' is not a number"),
        ("loaders=0", "0 is not a positive integer"),
        ("samples=-1", "-1 is not a finite number"),
    ],
)
def test_a_plan_of_a_run_is_checked(text: str, message: str) -> None:
    with pytest.raises(SlipstreamError, match=message):
        TrainingPlan.parse(text)


def test_a_global_batch_is_relative_to_the_fewest_workers(transformer: Graph) -> None:
    """The recorded batch is the share of each of four workers."""
    points = curve(
        transformer, SWITCH, [4], global_batch=4 * transformer.samples, durations=DURATIONS
    ).points
    assert points[0].efficiency == pytest.approx(1.0)
    (alone,) = curve(transformer, SWITCH, [4], durations=DURATIONS).points
    assert alone.prediction.step_ns == points[0].prediction.step_ns
    assert alone.efficiency < 1
