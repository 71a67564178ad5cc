"""`TaskSelection`: tasks selected by their properties, to be changed together.

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
        edit: the edit to which changes are added.
        tasks: int64 [chosen], ascending.
    """

    edit: Editor
    tasks: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tasks.tolist())

    def scale(self, factor: float, provenance: Provenance = Provenance.USER) -> TaskSelection:
        """Multiply the duration of each task by `factor`."""
        self.edit.scale(self.tasks, factor, provenance)
        return self

    def set_duration(
        self, duration_ns: float, provenance: Provenance = Provenance.USER
    ) -> TaskSelection:
        """Set the duration of each task, in ns."""
        self.edit.set_duration(self.tasks, duration_ns, provenance)
        return self

    def remove(self) -> TaskSelection:
        """Remove the tasks; tasks that waited for one then wait for its causes."""
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
    """Return the tasks that meet all given conditions.

    Args:
        op, module, source: patterns (``*``, ``?``, ``[abc]``) of the operator's name, the module's
            qualified name, and ``file:line``.
        phase: ``forward``, ``backward``, ``optimizer`` or another name of `StepPhase`.
        kind: a name of `Kind`, such as ``kernel``.
        where: a predicate of the task number.

    Returns:
        int64 [chosen], ascending; empty if no task matches.

    Raises:
        InvalidArgumentError: the phase or kind does not exist.
    """
    tasks = graph.tasks
    chosen = np.ones(len(tasks), bool)
    for pattern, column in ((op, tasks.name), (module, tasks.module), (source, tasks.source)):
        if pattern is not None:
            matched = [fnmatch.fnmatchcase(text, pattern) for text in graph.strings]
            chosen &= np.array(matched, bool)[column]
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
    values = {member.name.lower(): int(member) for member in names}
    if name.lower() not in values:
        raise InvalidArgumentError(
            argument, f"'{name}' does not exist", remedy="pass one of " + ", ".join(sorted(values))
        )
    return values[name.lower()]
