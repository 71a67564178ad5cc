"""Workspaces of edited tasks: memory used only while they run."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import Durations
from slipstream.graph import Call, Editor, Graph, Role
from slipstream.graph.graph import cached_per_graph

_Numbers = NDArray[np.int64]


@cached_per_graph
def workspaces(graph: Graph) -> _Numbers:
    """Return the allocation of each task's workspace, int64 [tasks + 1]; -1 for none."""
    memory = graph.memory
    scratch = np.flatnonzero((memory.producer == memory.release) & (memory.storage < 0))
    workspace = np.full(len(graph) + 1, -1)
    workspace[memory.producer[scratch]] = scratch
    return workspace


def measured_workspaces(durations: Durations, calls: Iterable[Call]) -> _Numbers:
    """Return the measured workspace of each call in bytes, int64 [calls]; -1 if unknown."""
    answers = [durations.lookup(call) for call in calls]
    needs = [
        -1 if answer is None or answer.workspace is None else answer.workspace for answer in answers
    ]
    return np.array(needs, np.int64)


def resize_workspaces(edit: Editor, graph: Graph, tasks: _Numbers, nbytes: _Numbers) -> None:
    """Set the workspace of each of `tasks` to `nbytes`; negative ones leave it unchanged."""
    measured = nbytes >= 0
    tasks, nbytes = tasks[measured], nbytes[measured]
    scratch = workspaces(graph)[tasks]
    exists = scratch >= 0
    edit.resize(scratch[exists], nbytes[exists])
    new = ~exists & (nbytes > 0)
    ones = np.ones(int(new.sum()), np.int64)
    edit.allocate(nbytes[new], ones * Role.TEMPORARY, tasks[new], tasks[new], -ones)
