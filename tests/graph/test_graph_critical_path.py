"""The critical path, slack, lanes, communication and virtual speed-ups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidArgumentError
from slipstream.graph import (
    Dependency,
    Graph,
    Kind,
    Timeline,
    communication,
    find_critical_path,
    lane_utilisation,
    replace_tasks,
    replay,
    virtual_speedups,
)
from slipstream.graph.views.critical_path import GROUPS, Causes
from small_graphs import graph_of, graphs


def _two_lanes() -> Graph:
    # lane 0:  a 0-10, gap 2, c 12-17      lane 1:  b waits for a: 10-30, d 30-34
    return graph_of([(0, 10, 2), (1, 20, 0), (0, 5, 13), (1, 4, 0)], [(0, 1), (2, 3)])


def test_the_path_follows_what_each_task_waited_for() -> None:
    # Steps follow each other on lane 0 after 30 ns; lane 1 is busy for 24 of them.
    path = find_critical_path(replay(_two_lanes()))
    # From the end of the first step at 34: a's second run ends at 40, then b and d.
    assert path.task.tolist() == [0, 1, 3]
    assert path.busy_ns.tolist() == [6, 20, 4]
    assert [Dependency(kind) for kind in path.via][1:] == [Dependency.DATA, Dependency.THREAD_ORDER]
    assert path.step_ns == 30


def test_waiting_is_attributed_to_the_waiting_task() -> None:
    path = find_critical_path(replay(graph_of([(0, 10, 3), (1, 20, 0)], [(0, 1, 7), (1, 0, 5, 1)])))
    assert path.step_ns == 42
    assert dict(zip(path.task.tolist(), path.waited_ns.tolist(), strict=True)) == {0: 5, 1: 7}
    assert path.by_dependency() == {Dependency.DATA: 12}


def test_slack_is_how_much_later_a_task_may_end() -> None:
    # c may end at 30 instead of 17, when d starts; no other task may end later.
    line = replay(_two_lanes())
    assert find_critical_path(line).slack_ns.tolist() == [0, 0, 13, 0]


@settings(max_examples=300)
@given(graphs())
def test_contributions_add_up_to_the_step(graph: Graph) -> None:
    path = find_critical_path(replay(graph))
    total = path.busy_ns.sum() + path.waited_ns.sum()
    assert total == pytest.approx(path.step_ns, abs=1e-3)
    for group in GROUPS:
        assert sum(c.total_ns for c in path.by(group)) == pytest.approx(path.step_ns, abs=1e-3)


@settings(max_examples=300)
@given(graphs())
def test_the_path_is_one_chain_from_the_end(graph: Graph) -> None:
    line = replay(graph)
    path = find_critical_path(line)
    assert path.end_ns[-1] == line.schedule.step_end_ns[-1]
    # Each begins at the end of the previous one, plus the waiting in between.
    assert np.allclose(path.start_ns[1:], path.end_ns[:-1] + path.waited_ns[1:])
    assert (path.waited_ns >= 0).all()
    # Before the step, only tasks that still ran at its start are on it.
    began = line.schedule.step_end_ns[-2] if len(line.schedule.step_end_ns) > 1 else -1.0
    assert (path.end_ns[:-1] > began).all()
    assert path.slack_ns[path.task[-1]] == 0


def _latest_ends(line: Timeline) -> list[float]:
    """An independent reference: backwards from the end through the tasks of two steps."""
    graph, program = line.graph, line.schedule.program
    n, end = len(graph), float(line.schedule.step_end_ns[-1])
    lane = graph.tasks.lane.tolist()
    latest = {(1, t): end for t in range(n)} | {(0, t): end for t in range(n)}
    duration, gap = program.duration_ns.tolist(), program.gap_ns.tolist()
    after = {}
    order = [(k, t) for k in range(2) for t in range(n)]
    for place, (k, t) in enumerate(order):
        same = [(j, u) for j, u in order[place + 1 :] if lane[u] == lane[t]]
        after[k, t] = same[0] if same else None
    e = graph.edges
    delays = program.edges.delay_ns.tolist()
    for k, t in reversed(order):
        following = after[k, t]
        if following is not None:
            start = latest[following] - duration[following[1]]
            latest[k, t] = min(latest[k, t], start - gap[t])
        for i in range(len(e)):
            target = (k + int(e.lag[i]), int(e.target[i]))
            if e.source[i] == t and target in latest:
                start = latest[target] - duration[target[1]]
                latest[k, t] = min(latest[k, t], start - delays[i])
    return [latest[1, t] for t in range(n)]


@settings(max_examples=300)
@given(graphs())
def test_slack_agrees_with_a_backward_pass(graph: Graph) -> None:
    line = replay(graph)
    expected = np.array(_latest_ends(line)) - line.schedule.end_ns[-1]
    assert find_critical_path(line).slack_ns == pytest.approx(expected, abs=1e-3)


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="operator, module"):
        find_critical_path(replay(_two_lanes())).by("colour")


def test_lanes_are_busy_in_a_gap_or_idle() -> None:
    first, second = lane_utilisation(replay(_two_lanes()))
    assert (first.busy_ns, first.gap_ns, first.idle_ns) == (15, 15, 0)
    assert (second.busy_ns, second.gap_ns, second.idle_ns) == (24, 0, 6)
    assert second.busy == pytest.approx(0.8)


def test_communication_is_exposed_while_nothing_computes() -> None:
    # kernel 0-10, all-reduce 10-30 concurrent with a kernel of 10-18.
    graph = graph_of([(0, 10, 0), (1, 20, 0), (0, 8, 0)], [(0, 1)])
    kinds = np.array([Kind.KERNEL, Kind.COMMUNICATION, Kind.KERNEL], np.uint8)
    found = communication(replay(replace_tasks(graph, kind=kinds)))
    assert (found.total_ns, found.exposed_ns) == (20, 12)


def test_a_virtual_speed_up_helps_only_on_the_path() -> None:
    # b takes 20 of 22 ns on lane 1, the only bottleneck; c is hidden.
    graph = graph_of([(0, 10, 0), (1, 20, 2), (0, 5, 0)])
    curves = {curve.name: curve for curve in virtual_speedups(graph, faster=(0.5, 0.1))}
    assert curves["task 1"].baseline_ns == 22
    assert curves["task 1"].faster == (0.1, 0.5)
    # From 15 ns on, lane 0 is the bottleneck.
    assert curves["task 1"].step_ns == (20, 15)
    assert curves["task 1"].speedups[1] == pytest.approx(22 / 15)
    assert curves["task 2"].gains == (0, 0)


@given(graphs(), st.sampled_from(GROUPS))
def test_virtual_speed_ups_never_slow_down_and_are_monotonic(graph: Graph, group: str) -> None:
    for curve in virtual_speedups(graph, group):
        steps = (curve.baseline_ns, *curve.step_ns)
        work = replay(graph).schedule.step_end_ns
        # Steps overlap, so the end of one step may move by more than that of the other.
        assert all(step <= work[-1] + 1e-3 for step in steps)
        assert all(0 <= share <= 1 for share in curve.faster)


def test_shares_outside_the_range_are_refused() -> None:
    for faster in ((), (0.0,), (1.5,)):
        with pytest.raises(InvalidArgumentError, match="shares"):
            virtual_speedups(_two_lanes(), faster=faster)


def test_an_empty_graph_has_an_empty_path() -> None:
    path = find_critical_path(replay(graph_of([])))
    assert len(path) == 0
    assert path.by("operator") == []


def test_device_copies_count_as_computing_and_issuing_hosts_do_not() -> None:
    # An all-reduce of 0-30, a host that issues 0-30, a kernel of 0-10 and a copy of 10-15.
    graph = graph_of([(0, 30, 0), (1, 30, 0), (2, 10, 0), (2, 5, 0)])
    kinds = [Kind.OP, Kind.COMMUNICATION, Kind.KERNEL, Kind.COPY]
    found = communication(replay(replace_tasks(graph, kind=np.array(kinds, np.uint8))))
    assert (found.total_ns, found.exposed_ns) == (30, 15)
    # Without a device the host computes.
    kinds[2:] = [Kind.LAUNCH, Kind.LAUNCH]
    found = communication(replay(replace_tasks(graph, kind=np.array(kinds, np.uint8))))
    assert (found.total_ns, found.exposed_ns) == (30, 0)


def test_no_gap_comes_before_the_first_step() -> None:
    # The lane's last gap delays the next step; before the first step there is none.
    causes = Causes(replay(graph_of([(0, 10, 3), (0, 5, 7)])))
    assert causes.free_ns(0).tolist() == [0, 13]
    assert causes.free_ns(1).tolist() == [25, 38]
