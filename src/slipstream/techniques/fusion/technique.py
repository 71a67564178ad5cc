"""fusion: contraction-free regions of the model in generated kernels, forward and backward.

Source: Ivanov et al., "Data Movement Is All You Need: A Case Study on Optimizing Transformers",
MLSys 2021.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.codegen import why_no_compiler, why_no_triton
from slipstream.durations import pace
from slipstream.graph import Call, Editor, Graph, StepPhase, calls_of, price
from slipstream.graph.graph import kept
from slipstream.provenance import Provenance
from slipstream.source import Places, Source
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.techniques._baseline import already_compiled
from slipstream.units import format_duration
from slipstream.workload import BuiltWorkload, Workload

if TYPE_CHECKING:
    from slipstream.techniques.fusion.recorded import RecordedRegion

# Guards, and calling what was compiled, once forward and once backward.
_OVERHEAD_NS = 60e3
# Of an operator that a traced pass calls from Python: passes of nothing but calls took 0.6 to
# 0.9 ms more than eager mode for some 200 operators.
_CALL_NS = 3e3
# Of inductor's compilation, once: 20 s of CPU time for 52 operators; 356 took 1.8 times as long.
_COMPILE_S, _COMPILE_CALL_S = 17.0, 0.05


@dataclass(frozen=True)
class Fusion(TechniqueSettings):
    """Regions of the model's operators, without matrix products and convolutions, in one kernel."""

    name: ClassVar[str] = "fusion"
    traits: ClassVar[Traits] = Traits(stage=Stage.COMPILE, conflicts=frozenset({"compile"}))
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING,
        "the same operators in one pass, in float32 or wider: sums may round differently; dropout "
        "drops as often, by other random numbers",
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why nothing can be fused."""
        if (reason := already_compiled(graph)) is not None:
            return reason
        devices = {spec.device for kind in _kinds(graph) for spec in kind.call.outputs}
        if "cpu" in devices and (reason := why_no_compiler()) is not None:
            return f"kernels are generated in C++, and {reason}"
        if "cuda" in devices and (reason := why_no_triton()) is not None:
            return f"kernels are generated in Triton: {reason}"
        if not devices:
            return (
                "no operators of this step can share a kernel: they are small, unknown, have an "
                "effect, or stand alone between matrix products"
            )
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Every region's kernel beside the operators it replaces."""
        return [call for kind in _kinds(graph) for call in (kind.call, *kind.recorded)]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """One task in the place of each region whose kernel is faster; the others stay.

        All stay where the passes would not be enough faster for the kernels to be kept.
        """
        from slipstream.techniques.fusion.autotune import MOST

        kinds, column = _kinds(graph), graph.tasks
        edit = Editor(graph, str(self))
        # In the order of the regions, whose sum it is.
        every = sorted([row for kind in kinds for row in kind.tasks.tolist()], key=itemgetter(-1))
        in_step = pace(graph, itertools.chain.from_iterable(every), context.durations)
        passes = np.isin(graph.tasks.phase, [StepPhase.FORWARD, StepPhase.BACKWARD])
        operators = int((passes & (graph.tasks.call >= 0)).sum())
        overhead_ns = _OVERHEAD_NS + _CALL_NS * operators
        chosen, removed, saved_ns, first = 0, 0, -overhead_ns, len(graph)
        for kind in kinds:
            before_ns = column.duration_ns[kind.tasks].sum(axis=1)
            cost = price(context.durations, kind.call, math.nan, pace=in_step)
            kernel_ns = np.full(len(before_ns), cost.nanoseconds)
            if math.isnan(cost.nanoseconds):
                kernel_ns = before_ns * kind.share_of_bytes
            fused = ~(cost.nanoseconds > MOST * before_ns)
            tasks = kind.tasks[fused]
            if not len(tasks):
                continue
            last = tasks[:, -1]
            edit.insert_all(
                last, "fused", kernel_ns[fused], cost.provenance, gap_ns=column.gap_ns[last],
                spread=cost.spread, call=edit.call_number(kind.call),
            )  # fmt: skip
            edit.remove(tasks.ravel())
            chosen += len(tasks)
            removed += tasks.size
            saved_ns += float((before_ns - kernel_ns)[fused].sum())
            first = min(first, int(tasks[:, 0].min()))
        if saved_ns < (1 - MOST) * _passes_ns(graph):
            return Editor(graph, str(self)).apply("nothing: its kernels would save too little")
        spot = max(first - 1, 0)
        edit.insert(spot, "guards and calls", overhead_ns, Provenance.ASSUMED, spread=1.0)
        words = f"{removed} operators in {chosen} kernels"
        if chosen < len(every):
            words += f"; {len(every) - chosen} regions are faster as they are"
        once = format_duration((_COMPILE_S + _COMPILE_CALL_S * operators) * 1e9)
        return edit.apply(f"{words}; the first call also compiles with inductor, about {once}")

    def apply(self, built: BuiltWorkload) -> None:
        """Let every call of the model go through torch.compile with our back end.

        The first call times the model's pass as written, with kernels and compiled by inductor,
        and later calls run the fastest. Buffers, hooks and names stay; a copy of the model is
        plain.

        Raises:
            WorkloadError: the step hides its model, or the model is compiled already.
        """
        from slipstream.techniques.fusion.backend import use_fused

        built.need_model(self.name)
        use_fused(built.model)

    def code(self, workload: Workload) -> CodeChange | None:
        """Two lines: the import, and the call after the model is made."""

        def edit(where: Places) -> Source:
            return where.with_named_model().after_model(
                '{model} = {torch}.compile({model}, backend="slipstream_fusion", dynamic=False)'
            )

        return CodeChange.of(
            workload, edit,
            by_hand='model = torch.compile(model, backend="slipstream_fusion", dynamic=False)',
            note="the back end is registered by the package; the first step compiles",
            technique=self,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Kind:
    """Regions that make the same calls and become the same kernel.

    Attributes:
        call: of the kernel.
        recorded: the calls of a region's tasks, in order.
        tasks: int64 [regions, tasks], in the order of the regions' last ones.
    """

    call: Call
    recorded: list[Call]
    tasks: NDArray[np.int64]

    @property
    def share_of_bytes(self) -> float:
        """The kernel's share of the bytes that its operators move: of their time, if not timed."""
        before = sum(call.moved_bytes for call in self.recorded)
        return min(self.call.moved_bytes / max(before, 1), 1.0)


@kept
def _kinds(graph: Graph) -> list[_Kind]:
    """Return the regions of the step by kind."""
    # Regions are of torch's operators; the name of the technique is read without torch.
    from slipstream.techniques.fusion.recorded import recorded_regions

    regions_of: dict[tuple[str, tuple[int, ...]], list[RecordedRegion]] = {}
    for region in recorded_regions(graph):
        numbers = tuple(graph.tasks.call[list(region.tasks)].tolist())
        regions_of.setdefault((region.call.key, numbers), []).append(region)
    return [
        _Kind(
            regions[0].call, calls_of(graph, regions[0].tasks), np.array([r.tasks for r in regions])
        )
        for regions in regions_of.values()
    ]


def _passes_ns(graph: Graph) -> float:
    """Of the forward and backward passes: what their tasks take."""
    inside = np.isin(graph.tasks.phase, [StepPhase.FORWARD, StepPhase.BACKWARD])
    return float(graph.tasks.duration_ns[inside].sum())
