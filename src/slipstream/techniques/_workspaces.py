"""What an edited task needs while it runs, beyond what it returns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import Editor, Graph, Role
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
