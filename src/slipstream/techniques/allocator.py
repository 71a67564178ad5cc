"""Keep freed memory: the next step finds its pages mapped instead of asking for them again.

Source: glibc's ``mallopt(3)``; the same advice, given with other allocators, stands in PyTorch's
performance tuning guide ("use jemalloc or TCMalloc").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from slipstream import heap
from slipstream.errors import WorkloadError
from slipstream.graph import Editor, Graph
from slipstream.graph.page_faults import PAGE_FAULT_LAUNCHES, page_fault_ns, page_fault_tasks
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.workload import BuiltWorkload, Workload


@dataclass(frozen=True)
class Allocator(TechniqueSettings):
    """Let glibc ``keep`` every page it has, instead of giving the largest back to the system."""

    pages: Literal["keep"] = "keep"

    name: ClassVar[str] = "allocator"
    traits: ClassVar[Traits] = Traits(stage=Stage.COMPILE + 7)
    effect: ClassVar[Quality] = Quality(QualityKind.EXACT, "only where memory comes from changes")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why there is nothing to gain."""
        device = str(graph.meta.get("device", "cpu"))
        if device != "cpu":
            return f"the step's memory is the device's ('{device}'), whose allocator keeps it"
        if not page_fault_tasks(graph):
            return "hardly any page is faulted in during a step: its memory is kept already"
        return None

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Take the page faults away."""
        edit = Editor(graph, str(self))
        edit.remove(np.array(page_fault_tasks(graph)))
        milliseconds = page_fault_ns(graph) / 1e6
        launches = [one / 1e6 for one in graph.meta.get(PAGE_FAULT_LAUNCHES, ())]
        rests_on = (
            f", the mean of {len(launches)} launches, {min(launches):.1f} to {max(launches):.1f} ms"
            if launches
            else ""
        )
        return edit.apply(f"no page faults: {milliseconds:.1f} ms less{rests_on}")

    def apply(self, built: BuiltWorkload) -> None:
        """Tell the C library, for as long as the process lives.

        Raises:
            WorkloadError: it is not glibc.
        """
        if not heap.keep_pages():
            raise WorkloadError(
                "the C library of this system cannot be told to keep its pages",
                remedy="leave 'allocator' out; it needs Linux with glibc",
            )

    def code(self, workload: Workload) -> CodeChange | None:
        """Two calls of ``mallopt`` at the top; environment variables do the same."""
        variables = " ".join(f"{name}={value}" for name, value in heap.KEEPING.items())
        lines = (
            "libc = __import__('ctypes').CDLL(None)  # keep freed pages, see mallopt(3)",
            "libc.mallopt(-1, -1), libc.mallopt(-4, 0)  # M_TRIM_THRESHOLD, M_MMAP_MAX",
        )
        return CodeChange.of(
            workload,
            lambda where: where.at_top(*lines),
            by_hand="\n".join(lines),
            note=f"the same without an edit: {variables} python ...",
        )
