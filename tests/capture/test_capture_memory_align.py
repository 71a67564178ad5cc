"""Memory of steps some of which write a checkpoint."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.capture import program
from slipstream.capture.memory import NOTHING_SEEN, MemoryRecord, allocations, record_memory
from slipstream.capture.memory_align import fit
from slipstream.capture.trace import Node
from slipstream.capture.units import Units, find_units
from slipstream.errors import GraphError
from slipstream.graph import Graph, find_peak, replay
from slipstream.graph.call import Call, TensorSpec
from slipstream.verbs.profiling import profile
from slipstream.workload import BuiltWorkload, Workload


def loop(every: int, at: int, save: Callable[[nn.Module], Any]) -> Graph:
    """Record a training step, after which every `every`-th one calls `save`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    inputs, count = torch.randn(16, 32), [0]

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        count[0] += 1
        if every and count[0] % every == at:
            save(model)
        return loss.detach()

    return profile(Workload.of(step), warmup=1, steps=2, threads=1)


def checkpoint(model: nn.Module) -> None:
    torch.save(model.state_dict(), io.BytesIO())


@pytest.mark.parametrize(("every", "at"), [(1, 0), *((5, at) for at in range(5))])
def test_a_checkpoint_in_some_steps_does_not_change_the_peak(every: int, at: int) -> None:
    plain, saving = loop(0, 0, checkpoint), loop(every, at, checkpoint)
    assert "memory_reason" not in saving.meta
    assert replay(saving).peak_bytes == pytest.approx(replay(plain).peak_bytes, rel=0.01)
    saving.memory.check(len(saving))


def copies(model: nn.Module, alive: list[Any] = []) -> None:  # noqa: B006 (alive between steps)
    alive[:] = [parameter.detach().clone() for parameter in model.parameters()]


def test_memory_is_recorded_again_until_steps_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[bool] = []

    def record(built: BuiltWorkload) -> Generator[None, None, Any]:
        records.append(True)
        result = yield from record_memory(built)
        records.append(False)
        return result

    def save(model: nn.Module) -> None:
        if records != [True]:  # the first time that memory is recorded
            copies(model)

    monkeypatch.setattr(program, "record_memory", record)
    assert len(loop(1, 0, save).memory)
    assert records == [True, False] * 2


def test_large_unobserved_copies_are_a_stored_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "_RETRIES", 0)
    found = [loop(5, at, copies) for at in range(5)]
    without = [graph for graph in found if not len(graph.memory)]
    # One of the five repetitions coincides with the recorded step.
    assert len(without) == 1
    reason = without[0].meta["memory_reason"]
    assert re.search(r"\boperators\b.*\b10\.\d", reason)
    assert "record it again" in reason
    with pytest.raises(GraphError, match="lacks operators"):
        find_peak(replay(without[0]))


def node(name: str, storages: tuple[int, ...] = ()) -> Node:
    spec = TensorSpec("float32", (256,), (1,))
    call = Call(f"{name}(Tensor x) -> Tensor", (spec,), (spec,) * (len(storages) - 1))
    return Node(name, -1, -1, call, storages)


TRACE = [node("aten::mm", (1, 2)), node("aten::relu", (2, 3)), node("aten::tanh", (3, 4))]


def watched(
    *events: tuple[str, int, int], changes: tuple[tuple[int, int, int], ...]
) -> MemoryRecord:
    names, start, end = zip(*events, strict=True)
    return MemoryRecord(
        names, np.array(start), np.array(end), ((),) * len(names), changes, {}, frozenset()
    )


def units() -> Units:
    return find_units(TRACE)


def test_allocations_of_foreign_operators_do_not_belong_to_the_step() -> None:
    events = (("aten::mm", 0, 9), ("aten::relu", 10, 19), ("copy", 20, 29), ("aten::tanh", 30, 39))
    own = ((1, 100, 1024), (11, 101, 1024), (31, 102, 1024), (35, 100, -1024))
    passing = ((21, 200, 9999), (28, 200, -9999))
    retained = ((22, 201, 77),)
    record = watched(*events, changes=tuple(sorted((*own, *passing, *retained))))
    fitted = fit(record, units())
    assert not isinstance(fitted, str)
    assert fitted[0].changes == tuple(sorted((*own, *retained)))
    assert fitted[1].all()
    # Inside a unit it is another way to do the unit's work.
    inside = replace(record, end_ns=np.array([9, 29, 29, 39]))
    fitted = fit(inside, units())
    assert not isinstance(fitted, str)
    assert fitted[0].changes == record.changes


def test_unobserved_operators_are_placed_between_their_neighbours() -> None:
    record = watched(("aten::mm", 0, 9), ("aten::tanh", 30, 39), changes=((31, 102, 1024),))
    fitted = fit(record, units())
    assert not isinstance(fitted, str)
    assert fitted[0].start_ns.tolist() == [0, 30, 30]
    assert fitted[0].end_ns.tolist() == [9, 30, 39]
    assert fitted[1].tolist() == [True, False, True]
    found, reason = allocations(record, TRACE, units(), [])
    assert not len(found)
    assert "1.00 KiB" in reason


def test_a_different_step_gives_no_memory() -> None:
    record = watched(("aten::conv", 0, 9), ("aten::tanh", 10, 39), changes=((11, 102, 1024),))
    found, reason = allocations(record, TRACE, units(), [])
    assert not len(found)
    assert re.search(r"\b40 % of its operators\b", reason)
    assert allocations(None, TRACE, units(), [])[1] == NOTHING_SEEN
