"""The growth of the heap in every step, and its effect on page faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slipstream.graph import Allocations, Editor, Graph, Role, Timeline, replay
from slipstream.graph.page_faults import PAGE_FAULTS, heap_growth, page_fault_ns, with_page_faults
from slipstream.provenance import Provenance
from tiny_models import captured

_MIB = 1 << 20


def with_memory(*rows: tuple[int, int, int]) -> Graph:
    """Return a recorded step with other memory: bytes, producer and release of each allocation."""
    nbytes, producer, release = zip(*rows, strict=True)
    n = len(rows)
    memory = Allocations.of(nbytes, [-1] * n, [int(Role.ACTIVATION)] * n, producer, release)
    graph = captured("mlp")
    edit = Editor(graph, "")
    edit.insert(len(graph) - 1, PAGE_FAULTS, 1e6, Provenance.MEASURED, spread=0.1)
    return replace(edit.apply(""), memory=memory)


def growth(*rows: tuple[int, int, int]) -> float:
    return heap_growth(replay(with_memory(*rows)))


def test_memory_freed_gradually_stays_in_the_heap() -> None:
    # Each block is freed alone: less than the heap retains.
    assert growth(*((_MIB, task, task) for task in range(1, 6))) == 0


def test_memory_freed_together_is_returned_and_grows_again() -> None:
    blocks = [(4 * _MIB, task, 9) for task in range(1, 9)]
    # Freed one after the other, all free memory is returned once it exceeds what the heap may
    # retain at its top: more than 4, 8 or 16 MiB.
    assert growth(*blocks) == pytest.approx((4 * 8 + 2 * 12 + 20) / 3 * _MIB)
    twice = [(8 * _MIB, task, 9) for task in range(1, 9)]
    assert growth(*twice) == 2 * growth(*blocks)


def test_allocations_that_outlive_the_step_do_not_count() -> None:
    blocks = [(4 * _MIB, task, 9) for task in range(1, 9)]
    assert growth(*blocks, (64 * _MIB, -1, -1)) == growth(*blocks)


def after(before: Graph, graph: Graph) -> Graph:
    found = with_page_faults(replay(before), replay(graph))
    again = replay(found.graph)
    assert np.array_equal(found.start_ns, again.start_ns)
    assert found.step_ns == again.step_ns
    return found.graph


def test_page_faults_scale_with_the_growth() -> None:
    blocks = [(4 * _MIB, task, 9) for task in range(1, 9)]
    before, half = with_memory(*blocks), with_memory(*blocks[:4])
    found = after(before, half)
    factor = growth(*blocks[:4]) / growth(*blocks)
    assert 0 < factor < 0.5
    assert page_fault_ns(found) == pytest.approx(factor * 1e6)
    assert found.tasks.spread[-1] > before.tasks.spread[-1]
    assert found.edits[-1].technique == PAGE_FAULTS


def test_equal_or_unrecorded_memory_changes_nothing() -> None:
    before = with_memory(*[(4 * _MIB, task, 9) for task in range(1, 9)])
    assert after(before, before) is before
    without = replace(before, memory=Allocations.none())
    assert after(without, without) is without
    plain = captured("mlp")
    assert after(plain, plain) is plain


def test_repeated_page_faults_are_distributed_again() -> None:
    blocks = [(4 * _MIB, task, 9) for task in range(1, 9)]
    before = with_memory(*blocks)
    tasks = before.tasks.take(np.append(np.arange(len(before)), len(before) - 1))
    counts = np.append(before.operand_start, before.operand_start[-1])
    doubled = replace(before, tasks=tasks, operand_start=counts)
    assert page_fault_ns(doubled) == 2e6
    assert page_fault_ns(after(before, doubled)) == pytest.approx(1e6)


def test_a_timeline_without_memory_grows_nothing() -> None:
    plain = replace(captured("mlp"), memory=Allocations.none())
    assert heap_growth(Timeline(plain, replay(plain).schedule)) == 0
