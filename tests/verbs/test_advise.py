"""Tests of which techniques and combinations advise shows and recommends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.durations import Durations
from slipstream.graph import Graph
from slipstream.graph.layers import module_layers
from slipstream.technique import Quality, QualityKind, parse
from slipstream.verbs import advising
from slipstream.verbs.advising import Advice, advise
from slipstream.verbs.checking import Check
from slipstream.verbs.goals import Goal
from slipstream.verbs.request import Request
from slipstream.verbs.results import Predicted, Refused
from slipstream.verbs.speedup_bounds import SpeedupBound
from slipstream.workload import Workload
from tiny_models import captured

MB = 2**20


def predicted(
    name: str, ratio: float, megabytes: int = 100, kind: QualityKind = QualityKind.EXACT
) -> Predicted:
    """A prediction with a narrow interval, for a step of 1 ms and 100 MB."""
    return Predicted(
        name, 1e6, 1e6 * ratio, ratio, ratio * 0.99, ratio * 1.01,
        memory=(100 * MB, megabytes * MB), quality=Quality(kind, "made up"),
        techniques=parse(name),
    )  # fmt: skip


@pytest.fixture(scope="module")
def graph() -> Graph:
    return captured("mlp")


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Advise from a table of predictions; real technique names, so that they combine."""

    def run(*table: Predicted, **options: Any) -> Advice:
        table_by_parts = {p.techniques: p for p in table}

        def predict(graph: Any, combinations: Sequence[Any], **_: Any) -> list[Predicted]:
            return [table_by_parts[parts] for parts in combinations if parts in table_by_parts]

        monkeypatch.setattr(advising, "predict", predict)
        bounds = [SpeedupBound(p) for parts, p in table_by_parts.items() if len(parts) == 1]
        monkeypatch.setattr(advising, "first_look", lambda *_: bounds)
        monkeypatch.setattr(advising, "need_graph", lambda graph: None)
        return advise(None, durations=Durations(1), **options)  # type: ignore[arg-type]

    return run


def names(advice: Advice) -> list[str]:
    return [p.technique for p in advice.predictions]


def test_useful_parts_are_joined_and_ranked(advised: Any) -> None:
    found = advised(
        predicted("amp:bf16", 0.7),
        predicted("channels_last", 0.9),
        predicted("fused_optimizer:fused", 1.05),
        predicted("channels_last+amp:bf16", 0.6),
        predicted("fused_optimizer:fused+amp:bf16", 0.5),
    )
    assert names(found)[0] == "channels_last+amp:bf16"
    # A part that does not help alone is not combined.
    assert "fused_optimizer:fused+amp:bf16" not in names(found)
    assert found.best is not None
    assert found.best.technique == "channels_last+amp:bf16"
    assert "fused_optimizer:fused" not in found.front


def test_a_combination_no_better_than_its_part_is_left_out(advised: Any) -> None:
    found = advised(
        predicted("amp:bf16", 0.7),
        predicted("channels_last", 0.9),
        predicted("channels_last+amp:bf16", 0.7),
    )
    assert names(found) == ["amp:bf16", "channels_last"]


def test_memory_savings_at_more_than_twice_the_time_are_not_combined(advised: Any) -> None:
    found = advised(
        predicted("amp:bf16", 2.1, 90),
        predicted("checkpointing", 1.9, 60),
        predicted("channels_last", 0.9),
        predicted("channels_last+amp:bf16", 2.0, 90),
        predicted("channels_last+checkpointing", 1.8, 60),
    )
    assert "amp:bf16" in names(found)
    assert "channels_last+amp:bf16" not in names(found)
    assert "channels_last+checkpointing" in names(found)


def test_a_combination_is_listed_once_whichever_part_comes_first(advised: Any) -> None:
    joint = predicted("dropout+robe_embedding:10.0", 0.5)
    for table in (("dropout", "robe_embedding:10.0"), ("robe_embedding:10.0", "dropout")):
        found = advised(*(predicted(name, 0.8) for name in table), joint)
        assert [name for name in names(found) if "+" in name] == [joint.technique]


def test_combinations_can_be_left_out(advised: Any) -> None:
    found = advised(
        predicted("amp:bf16", 0.7),
        predicted("channels_last", 0.9),
        predicted("channels_last+amp:bf16", 0.6),
        combinations=False,
    )
    assert names(found) == ["amp:bf16", "channels_last"]


def test_the_front_is_pareto_optimal_in_time_memory_and_numerics(advised: Any) -> None:
    found = advised(
        predicted("amp:bf16", 0.7, 90, QualityKind.ROUNDING),
        predicted("channels_last", 0.9, 100),
        predicted("accumulation:4", 0.95, 100, QualityKind.NEEDS_TRAINING),
        combinations=False,
    )
    assert found.front == {"amp:bf16", "channels_last"}


def test_prefers_techniques_that_need_no_training(advised: Any) -> None:
    found = advised(
        predicted("accumulation:4", 0.5, 100, QualityKind.NEEDS_TRAINING),
        predicted("channels_last", 0.9),
        combinations=False,
    )
    assert found.best is not None
    assert found.best.technique == "channels_last"


def test_a_limit_that_needs_a_technique_is_met_at_some_cost(advised: Any) -> None:
    goal = Goal("memory", 60 * MB)
    table = (predicted("channels_last", 0.9, 100), predicted("accumulation:4", 1.2, 50))
    found = advised(*table, goals=[goal], combinations=False)
    assert found.needed == (goal,)
    assert found.unmet == ()
    assert found.best is not None
    assert found.best.technique == "accumulation:4"


def test_a_limit_that_nothing_meets_is_named(advised: Any) -> None:
    goal = Goal("memory", 10 * MB)
    found = advised(predicted("channels_last", 0.9), goals=[goal], combinations=False)
    assert found.unmet == (goal,)
    assert found.best is None


def test_recommends_nothing_for_a_limit_that_is_met_already(advised: Any) -> None:
    goal = Goal("memory", 200 * MB)
    found = advised(predicted("channels_last", 1.1), goals=[goal], combinations=False)
    assert found.needed == ()
    assert found.best is None


def test_limits_that_only_hold_one_at_a_time_are_all_named(advised: Any) -> None:
    goals = [Goal("memory", 60 * MB), Goal("latency", 0.8e6)]
    found = advised(
        predicted("amp:bf16", 0.7, 90),
        predicted("accumulation:4", 1.2, 50),
        goals=goals,
        combinations=False,
    )
    assert found.unmet == tuple(goals)


def test_a_changed_model_must_be_worth_its_training(advised: Any) -> None:
    trained = QualityKind.NEEDS_TRAINING
    found = advised(
        predicted("lowrank:0.25", 0.97, kind=trained),
        predicted("lowrank:0.125", 0.98, megabytes=90, kind=trained),
        predicted("amp:bf16", 0.97),
    )
    assert names(found) == ["amp:bf16", "lowrank:0.125", "lowrank:0.25"]
    (refused,) = (p for p in found.predictions if p.why_not is not None)
    assert (refused.technique, refused.peak_bytes) == ("lowrank:0.25", 100 * MB)


def _lead(found: Advice, graph: Graph, **options: Any) -> list[str]:
    return list(found.table(graph, None, time_limit="60s", **options).lead)


def test_techniques_not_timed_that_could_be_better_are_named_first(graph: Graph) -> None:
    best = predicted("amp:bf16", 0.8)
    not_timed = {"fusion": 1.8, "sdpa": None, "lowrank:0.25": 1.2, "scan:auto": 20.0}
    late = [Refused(name, 1e6, "there was no time", busy=True) for name in not_timed]
    found = Advice((best, *late), frozenset(), best, not_timed=not_timed)
    first, second = _lead(found, graph)
    assert first == "first choice amp:bf16: predicted 1.25x [1.24, 1.26]"
    assert second == (
        "not timed in 60s, could be better: scan:auto (up to > 10x), fusion (up to 1.80x), "
        "sdpa (no bound); --time-limit 5min times them"
    )
    nothing = replace(found, best=None)
    assert _lead(nothing, graph)[0] == "nothing timed so far is worth the trouble"
    notes = found.table(graph, None, everything=False).notes
    assert "1 more was not timed, and cannot be better" in notes
    assert not any("there was no time" in note for note in notes)
    assert {"technique": "fusion", "speedup_at_most": 1.8} in found.to_json()["not_timed"]


def test_architecture_search_is_named_if_layers_take_most_of_the_time(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advising, "request_of", lambda graph: Request("net.py:make"))
    share = sum(graph.task(t).duration_ns for m in module_layers(graph) for t in m.tasks)
    share /= graph.tasks.duration_ns.sum()
    found = Advice((), frozenset(), None)
    workload: Any = object()
    note = "`slipstream nas space net.py:make`"
    monkeypatch.setattr(advising, "_MOSTLY", 0.9 * share)
    assert any(note in line for line in found.table(graph, workload).notes)
    monkeypatch.setattr(advising, "_MOSTLY", 1.1 * share)
    assert not any(note in line for line in found.table(graph, workload).notes)


def test_techniques_that_do_not_apply_are_only_counted_by_default(graph: Graph) -> None:
    best = predicted("amp:bf16", 0.8)
    others = [Refused(name, 1e6, "the step has none") for name in ("tf32", "sdpa")]
    busy = Refused("threads:2", 1e6, "the cores were busy", busy=True)
    found = Advice((best, *others, busy), frozenset(), best)
    short = found.table(graph, None, everything=False).notes
    assert "2 techniques do not apply here: --all lists them with their reasons" in short
    assert "threads:2 cannot be predicted here: the cores were busy" in short
    assert not any("the step has none" in note for note in short)
    assert sum("the step has none" in note for note in found.table(graph, None).notes) == 2
    assert len(found.to_json()["predictions"]) == 4


def test_a_measured_loss_leads_and_the_next_choice_follows(graph: Graph) -> None:
    best, second = predicted("amp:bf16", 0.8), predicted("channels_last", 0.9)
    check = Check(best, reason="RuntimeError", failed=True, alternative=second)
    found = Advice((best, second), frozenset(), best, second=second, check=check)
    table = found.table(graph, None)
    assert "fails here: RuntimeError; next choice, not measured: channels_last" in table.lead[0]
    assert any(note.endswith("--technique channels_last") for note in table.notes)
    assert found.to_json()["check"]["worth_it"] is False


def test_another_number_of_threads_than_the_users_is_no_candidate(advised: Any) -> None:
    assert not any("threads" in name for name in names(advised(predicted("amp:bf16", 0.7))))
    found = advised(predicted("amp:bf16", 0.7), threads=1)
    assert found.predictions[-1].technique.startswith("threads:")
    assert found.predictions[-1].why_not == "--threads 1 fixes the number of threads"


@pytest.mark.parametrize("function", ["", ":make"])
def test_techniques_without_an_edit_of_the_file_are_named(
    graph: Graph, tmp_path: Path, function: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\ndef make():\n    model = torch.nn.Linear(2, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), fused=True)\n"
        "    return model, torch.ones(2, 2), None, optimizer\n"
    )
    techniques = ("tf32", "fused_optimizer:fused", "batch_size:x2", "tf32+batch_size:x2")
    found = Advice(tuple(predicted(name, 0.9) for name in techniques), frozenset(), None)
    notes = found.table(graph, Workload.parse(f"{path}{function}")).notes
    line = "edit by hand, `slipstream apply` shows the lines and why: batch_size:x2"
    assert [note for note in notes if "by hand" in note] == [line]
    path.unlink()
    assert not any("by hand" in note for note in found.table(graph, None).notes)


def test_recommends_the_unmodified_step_if_nothing_is_worth_it(graph: Graph) -> None:
    assert "keep the step" in _lead(Advice((), frozenset(), None), graph)[0]


def test_the_second_choice_is_the_first_without_the_best(advised: Any) -> None:
    found = advised(
        predicted("amp:bf16", 0.7, 90, QualityKind.ROUNDING),
        predicted("channels_last", 0.8),
        combinations=False,
    )
    assert (found.best.technique, found.second.technique) == ("amp:bf16", "channels_last")


def test_an_inconclusive_prediction_without_a_gain_is_no_choice(advised: Any) -> None:
    open_ = replace(predicted("amp:bf16", 0.99), low=0.9, high=1.1)
    assert open_.verdict == "inconclusive"
    assert advised(open_, combinations=False).best is None
    saving = replace(open_, memory=(100 * MB, 50 * MB))
    assert advised(saving, combinations=False).best == saving
    assert advised(replace(open_, ratio=0.95), combinations=False).best is not None
    trained = predicted("lowrank:0.25", 0.8, kind=QualityKind.NEEDS_TRAINING)
    assert advised(open_, trained, combinations=False).best == trained
