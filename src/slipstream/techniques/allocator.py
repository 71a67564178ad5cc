"""Keep freed memory mapped, so that the next step does not fault its pages in again.

Source: glibc's ``mallopt(3)``; PyTorch's performance tuning guide recommends other allocators for
the same purpose ("use jemalloc or TCMalloc").
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
    """Let glibc ``keep`` all freed pages instead of returning large blocks to the system."""

    pages: Literal["keep"] = "keep"

    name: ClassVar[str] = "allocator"
    traits: ClassVar[Traits] = Traits(stage=Stage.COMPILE + 7)
    effect: ClassVar[Quality] = Quality(QualityKind.EXACT, "only the source of memory changes")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why there is nothing to gain; None if there is."""
        device = str(graph.meta.get("device", "cpu"))
        if device != "cpu":
            return f"the step's memory is the device's ('{device}'), whose allocator keeps it"
        if not page_fault_tasks(graph):
            return "hardly any page is faulted in during a step: its memory already stays mapped"
        return None

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Remove the page faults."""
        edit = Editor(graph, str(self))
        edit.remove(np.array(page_fault_tasks(graph)))
        milliseconds = page_fault_ns(graph) / 1e6
        launches = [ns / 1e6 for ns in graph.meta.get(PAGE_FAULT_LAUNCHES, ())]
        evidence = (
            f", the mean of {len(launches)} launches, {min(launches):.1f} to {max(launches):.1f} ms"
            if launches
            else ""
        )
        return edit.apply(f"no page faults: {milliseconds:.1f} ms less{evidence}")

    def apply(self, built: BuiltWorkload) -> None:
        """Configure the C library for the lifetime of the process.

        Raises:
            WorkloadError: the C library is not glibc.
        """
        if not heap.keep_pages():
            raise WorkloadError(
                "the C library of this system has no setting to keep its pages",
                remedy="omit 'allocator'; it needs Linux with glibc",
            )

    def code(self, workload: Workload) -> CodeChange | None:
        """Return two calls of ``mallopt`` at the top; environment variables do the same."""
        variables = " ".join(f"{name}={value}" for name, value in heap.KEEPING.items())
        lines = (
            "libc = __import__('ctypes').CDLL(None)  # keep freed pages, see mallopt(3)",
            "libc.mallopt(-1, -1), libc.mallopt(-4, 0)  # M_TRIM_THRESHOLD, M_MMAP_MAX",
        )
        return CodeChange.of(
            workload,
            lambda where: where.at_top(*lines),
            by_hand="\n".join(lines),
            note=f"without an edit: {variables} python ...",
        )
