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
from slipstream.graph.graph import cached_per_graph
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
from slipstream.techniques._baseline import already_compiled, hidden_model
from slipstream.units import format_duration
from slipstream.workload import BuiltWorkload, Workload

if TYPE_CHECKING:
    from slipstream.techniques.fusion.recorded import RecordedRegion

# Guards and calls of the compiled forward and backward pass.
_OVERHEAD_NS = 60e3
# Time of calling an operator of a traced pass from Python: passes without kernels took 0.6 to
# 0.9 ms more than eager mode for about 200 operators.
_CALL_NS = 3e3
# CPU time of compiling with inductor: 20 s for 52 operators, 1.8 times as long for 356.
_COMPILE_S, _COMPILE_CALL_S = 17.0, 0.05


@dataclass(frozen=True)
class Fusion(TechniqueSettings):
    """Regions of the model's operators without matmuls and convolutions as single kernels."""

    name: ClassVar[str] = "fusion"
    traits: ClassVar[Traits] = Traits(stage=Stage.COMPILE, conflicts=frozenset({"compile"}))
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING,
        "the same operators in one pass, in float32 or wider: sums may round differently; dropout "
        "uses other random numbers at the same rate",
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return the reason why nothing can be fused, or None."""
        if (reason := already_compiled(graph) or hidden_model(graph)) is not None:
            return reason
        devices = {spec.device for kind in _kinds(graph) for spec in kind.call.outputs}
        if "cpu" in devices and (reason := why_no_compiler()) is not None:
            return f"kernels are generated in C++, and {reason}"
        if "cuda" in devices and (reason := why_no_triton()) is not None:
            return f"kernels are generated in Triton: {reason}"
        if not devices:
            return (
                "no operators of this step can share a kernel: they are small, unknown, have a "
                "side effect, or are alone between matmuls"
            )
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the calls of every region's kernel and of the operators it replaces."""
        return [call for kind in _kinds(graph) for call in (kind.call, *kind.recorded)]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace each region whose kernel is faster by a single task.

        Nothing is replaced if the passes would not be enough faster for `apply` to use the kernels.
        """
        from slipstream.techniques.fusion.autotune import MAX_TIME_RATIO

        kinds, column = _kinds(graph), graph.tasks
        edit = Editor(graph, str(self))
        # In the order of the regions, since the order affects the rounding of the sum.
        regions = sorted([row for kind in kinds for row in kind.tasks.tolist()], key=itemgetter(-1))
        in_step = pace(graph, itertools.chain.from_iterable(regions), context.durations)
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
            fused = ~(cost.nanoseconds > MAX_TIME_RATIO * before_ns)
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
        if saved_ns < (1 - MAX_TIME_RATIO) * _passes_ns(graph):
            return Editor(graph, str(self)).apply("its kernels would save too little")
        spot = max(first - 1, 0)
        edit.insert(spot, "guards and calls", overhead_ns, Provenance.ASSUMED, spread=1.0)
        summary = f"{removed} operators in {chosen} kernels"
        if chosen < len(regions):
            summary += f"; {len(regions) - chosen} regions are faster without a kernel"
        compile_time = format_duration((_COMPILE_S + _COMPILE_CALL_S * operators) * 1e9)
        return edit.apply(
            f"{summary}; the first call also compiles with inductor, about {compile_time}"
        )

    def apply(self, built: BuiltWorkload) -> None:
        """Route calls of the model through torch.compile with our back end.

        The first call times the pass as written, with kernels, and compiled by inductor; later
        calls run the fastest. Buffers, hooks and names are unchanged; a copy of the model is plain.

        Raises:
            WorkloadError: the step hides its model, or the model is already compiled.
        """
        from slipstream.techniques.fusion.backend import use_fused

        built.need_model(self.name)
        use_fused(built.model)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the import, and the call after the model is created."""

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
    """Regions with equal calls, which become the same kernel.

    Attributes:
        call: the call of the kernel.
        recorded: the calls of a region's tasks, in order.
        tasks: int64 [regions, tasks], sorted by the last task of each region.
    """

    call: Call
    recorded: list[Call]
    tasks: NDArray[np.int64]

    @property
    def share_of_bytes(self) -> float:
        """Ratio of bytes moved, kernel to operators; estimates the time ratio if unmeasured."""
        before = sum(call.moved_bytes for call in self.recorded)
        return min(self.call.moved_bytes / max(before, 1), 1.0)


@cached_per_graph
def _kinds(graph: Graph) -> list[_Kind]:
    """Return the regions of the step, grouped by kind."""
    # Imported here, since parsing the technique must not import torch.
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
    """Return the duration of the tasks of the forward and backward pass."""
    inside = np.isin(graph.tasks.phase, [StepPhase.FORWARD, StepPhase.BACKWARD])
    return float(graph.tasks.duration_ns[inside].sum())
