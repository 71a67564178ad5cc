"""What an edited task needs while it runs, beyond what it returns."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import Durations
from slipstream.graph import Call, Editor, Graph, Role
from slipstream.graph.graph import kept

_Numbers = NDArray[np.int64]


@kept
def workspaces(graph: Graph) -> _Numbers:
    """int64 [tasks + 1], the allocation that is a task's workspace; -1: none."""
    memory = graph.memory
    scratch = np.flatnonzero((memory.producer == memory.release) & (memory.storage < 0))
    workspace = np.full(len(graph) + 1, -1)
    workspace[memory.producer[scratch]] = scratch
    return workspace


def measured_workspaces(durations: Durations, calls: Iterable[Call]) -> _Numbers:
    """int64 [calls], bytes as their kernels were measured to need; -1: not known."""
    answers = [durations.lookup(call) for call in calls]
    needs = [-1 if one is None or one.workspace is None else one.workspace for one in answers]
    return np.array(needs, np.int64)


def resize_workspaces(edit: Editor, graph: Graph, tasks: _Numbers, nbytes: _Numbers) -> None:
    """Give each of `tasks` a workspace of so many bytes; below 0 it stays as it is."""
    known = nbytes >= 0
    tasks, nbytes = tasks[known], nbytes[known]
    scratch = workspaces(graph)[tasks]
    there = scratch >= 0
    edit.resize(scratch[there], nbytes[there])
    new = ~there & (nbytes > 0)
    alike = np.ones(int(new.sum()), np.int64)
    edit.allocate(nbytes[new], alike * Role.TEMPORARY, tasks[new], tasks[new], -alike)
