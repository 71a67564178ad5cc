"""`TaskSelection`: tasks chosen by what they are, to be changed together.

edit = graph.what_if("a faster convolution")
edit.select(op="aten::convolution*", phase="backward").scale(1 / 1.8)
faster = edit.apply("backward of convolutions 1.8 times as fast")
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream.graph.values import Kind, StepPhase
from slipstream.provenance import Provenance

if TYPE_CHECKING:
    from slipstream.graph.edit import Editor
    from slipstream.graph.graph import Graph


@dataclass(frozen=True)
class TaskSelection:
    """Tasks of a graph, and the edit that changes them.

    Attributes:
        edit: takes the changes.
        tasks: int64 [chosen], ascending.
    """

    edit: Editor
    tasks: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tasks.tolist())

    def scale(self, factor: float, provenance: Provenance = Provenance.USER) -> TaskSelection:
        """Let each take `factor` times as long."""
        self.edit.scale(self.tasks, factor, provenance)
        return self

    def set_duration(
        self, duration_ns: float, provenance: Provenance = Provenance.USER
    ) -> TaskSelection:
        """Let each take so many ns."""
        self.edit.set_duration(self.tasks, duration_ns, provenance)
        return self

    def remove(self) -> TaskSelection:
        """Take them out; what waited for one waits for what it waited for."""
        self.edit.remove(self.tasks)
        return self


def matching(
    graph: Graph,
    *,
    op: str | None = None,
    module: str | None = None,
    source: str | None = None,
    phase: str | None = None,
    kind: str | None = None,
    where: Callable[[int], bool] | None = None,
) -> NDArray[np.int64]:
    """The tasks for which all hold that are given.

    Args:
        op, module, source: patterns (``*``, ``?``, ``[abc]``) of the operator's name, the module's
            qualified name, and ``file:line``.
        phase: ``forward``, ``backward``, ``optimizer`` or another name of `StepPhase`.
        kind: a name of `Kind`, as ``compute``.
        where: whether a task, by its number, is wanted.

    Returns:
        int64 [chosen], ascending; empty where nothing matches.

    Raises:
        InvalidArgumentError: no such phase or kind.
    """
    tasks = graph.tasks
    chosen = np.ones(len(tasks), bool)
    for pattern, column in ((op, tasks.name), (module, tasks.module), (source, tasks.source)):
        if pattern is not None:
            fits = [fnmatch.fnmatchcase(text, pattern) for text in graph.strings]
            chosen &= np.array(fits, bool)[column]
    if phase is not None:
        chosen &= tasks.phase == _named(StepPhase, "phase", phase)
    if kind is not None:
        chosen &= tasks.kind == _named(Kind, "kind", kind)
    matches = np.flatnonzero(chosen)
    if where is not None:
        matches = (
            matches[[bool(where(task)) for task in matches.tolist()]] if len(matches) else matches
        )
    return matches.astype(np.int64)


def _named(names: type[StepPhase] | type[Kind], argument: str, name: str) -> int:
    known = {one.name.lower(): int(one) for one in names}
    if name.lower() not in known:
        raise InvalidArgumentError(
            argument, f"'{name}' is none", remedy="one of " + ", ".join(sorted(known))
        )
    return known[name.lower()]
