"""Tests of page faults over several launches, which set the interval."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import slipstream as ss
from slipstream.errors import ChildError
from slipstream.graph import Graph, replay
from slipstream.graph.page_faults import (
    PAGE_FAULT_LAUNCHES,
    may_fault,
    page_fault_error_ns,
    page_fault_ns,
    page_fault_tasks,
    with_launches,
)
from slipstream.verbs.page_faults import launches_in_words, watch_launches
from slipstream.workload import Workload

_LARGE = """
import torch
from torch import nn

def make(batch_size=256):
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))
    batch = torch.randn(batch_size, 512), torch.zeros(batch_size, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, batch, nn.functional.cross_entropy, optimizer
"""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    path = tmp_path_factory.mktemp("launches") / "large.py"
    path.write_text(_LARGE)
    return ss.profile(Workload.parse(f"{path}:make"), threads=1, steps=4)


def without(graph: Graph) -> Graph:
    tasks = page_fault_tasks(graph)
    if not tasks:
        return graph
    edit = ss.graph.Editor(graph, "")
    edit.remove(tasks)
    return replace(edit.apply(""), edits=graph.edits)


def test_profile_watches_other_launches(graph: Graph) -> None:
    launches = graph.meta["page_fault_launches_ns"] if page_fault_tasks(graph) else [0.0]
    assert may_fault(graph)
    assert page_fault_ns(graph) == pytest.approx(sum(launches) / len(launches))


def test_launches_add_a_task_with_their_mean_and_spread(graph: Graph) -> None:
    bare = without(graph)
    step = replay(bare).step_ns
    found = with_launches(bare, [0.4 * step, 0.2 * step, 0.6 * step])
    assert page_fault_ns(found) == pytest.approx(0.3 * step)
    assert replay(found).step_ns == pytest.approx(1.3 * step)
    # Of 0, 0.4, 0.2 and 0.6: the deviation of one more launch from the mean of four.
    assert page_fault_error_ns(found) == pytest.approx(0.2582 * step * (5 / 4) ** 0.5, rel=1e-3)
    assert found.edits == bare.edits
    assert "0.0 % to 37.5 %" in launches_in_words(found)
    again = with_launches(found, [0.3 * step])
    assert len(page_fault_tasks(again)) == 1


def test_launches_without_faults_change_nothing(graph: Graph) -> None:
    bare = without(graph)
    assert with_launches(bare, []) is bare
    assert with_launches(bare, [0.0, 0.0]) is bare
    assert not page_fault_tasks(with_launches(bare, [0.001 * replay(bare).step_ns]))


def test_launches_that_agree_still_have_an_error(graph: Graph) -> None:
    bare = without(graph)
    step = replay(bare).step_ns
    same = with_launches(with_launches(bare, [0.2 * step]), [0.1 * step, 0.1 * step])
    assert page_fault_error_ns(same) >= 0.1 * page_fault_ns(same)


@pytest.mark.parametrize(
    ("shares", "watched"),
    [((0.002,) * 4, 1), ((0.02, 0.025, 0.0, 0.0), 2), ((0.1, 0.0, 0.1, 0.0), 4)],
)
def test_stops_when_faults_are_negligible_or_launches_agree(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, shares: tuple[float, ...], watched: int
) -> None:
    bare = without(graph)
    bare = replace(bare, meta={k: v for k, v in bare.meta.items() if k != PAGE_FAULT_LAUNCHES})
    step = replay(bare).step_ns
    launched: list[float] = []

    def another(*_args: object, **_more: object) -> float:
        launched.append(shares[len(launched)] * step)
        return launched[-1]

    monkeypatch.setattr("slipstream.verbs.page_faults.call_in_child", another)
    watch_launches(bare, Workload.parse(f"{__file__}:graph"))
    assert len(launched) == watched


@pytest.mark.parametrize(
    ("limits", "watched"),
    [
        ({"until": 7.0}, 2),  # the third would end at 9 s
        ({"until": 7.0, "launch_s": 8.0}, 0),
        ({"until": 2.0}, 0),  # killed
        ({"time_limit_s": 4.0}, 2),
    ],
)
def test_stops_at_the_deadline(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], watched: int
) -> None:
    bare = without(graph)
    bare = replace(bare, meta={k: v for k, v in bare.meta.items() if k != PAGE_FAULT_LAUNCHES})
    step, now = replay(bare).step_ns, [0.0]

    def another(*_args: object, until: float, **_more: object) -> float:
        began, now[0] = now[0], min(now[0] + 3.0, until)
        if now[0] < began + 3.0:
            raise ChildError("it was stopped")
        return 0.1 * now[0] * step

    monkeypatch.setattr("slipstream.verbs.page_faults.call_in_child", another)
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("slipstream.verbs.page_faults.time", clock)
    found = watch_launches(bare, Workload.parse(f"{__file__}:graph"), **limits)
    assert len(found.meta.get(PAGE_FAULT_LAUNCHES, [0])) == 1 + watched
    assert now[0] <= limits.get("until", 6.0)
