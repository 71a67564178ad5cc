"""fusion: contraction-free regions of the model in generated kernels, forward and backward.

Source: Ivanov et al., "Data Movement Is All You Need: A Case Study on Optimizing Transformers",
MLSys 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from slipstream.codegen import why_no_compiler, why_no_triton
from slipstream.durations import pace
from slipstream.graph import Call, Editor, Graph, StepPhase, calls_of, price
from slipstream.provenance import Provenance
from slipstream.source import Places, Source
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Settings, Stage, Traits
from slipstream.techniques._baseline import already_compiled
from slipstream.workload import Built, Workload

if TYPE_CHECKING:
    from slipstream.techniques.fusion.recorded import RecordedRegion

# Guards, and calling what was compiled, once forward and once backward.
_OVERHEAD_NS = 60e3


@dataclass(frozen=True)
class Fusion(Settings):
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
        devices = {spec.device for one in _regions(graph) for spec in one.call.outputs}
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

    def questions(self, graph: Graph) -> Sequence[Call]:
        """Every region's kernel beside the operators it replaces."""
        regions = _regions(graph)
        return [call for one in regions for call in (one.call, *calls_of(graph, one.tasks))]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """One task in the place of each region whose kernel is faster; the others stay.

        All stay where the passes would not be enough faster for the kernels to be kept.
        """
        from slipstream.techniques.fusion.autotune import MOST

        regions = _regions(graph)
        edit = Editor(graph, str(self))
        in_step = pace(graph, [t for one in regions for t in one.tasks], context.durations)
        chosen, removed, saved_ns = [], 0, -_OVERHEAD_NS
        for one in regions:
            before_ns = float(graph.tasks.duration_ns[list(one.tasks)].sum())
            known = context.durations.lookup(one.call)
            kernel = price(context.durations, one.call, _assumed(graph, one), pace=in_step)
            if known is not None and kernel.nanoseconds > MOST * before_ns:
                continue
            chosen.append(one)
            last = one.tasks[-1]
            edit.put(last, one.call, kernel, name="fused", gap_ns=graph.task(last).gap_ns)
            edit.remove(np.array(one.tasks))
            removed += len(one.tasks)
            saved_ns += before_ns - kernel.nanoseconds
        if saved_ns < (1 - MOST) * _passes_ns(graph):
            return Editor(graph, str(self)).apply("nothing: its kernels would save too little")
        first = min(one.tasks[0] for one in chosen)
        spot = max(first - 1, 0)
        edit.insert(spot, "guards and wrappers", _OVERHEAD_NS, Provenance.ASSUMED, spread=0.5)
        words = f"{removed} operators in {len(chosen)} kernels"
        if len(chosen) < len(regions):
            words += f"; {len(regions) - len(chosen)} regions are faster as they are"
        return edit.apply(words)

    def apply(self, built: Built) -> None:
        """Let every call of the model go through torch.compile with our back end.

        The first call times the model's pass with kernels and without; those that it is faster
        with stay, and where none does, later calls are plain. Buffers, hooks and names stay; a copy
        of the model is plain.

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


def _regions(graph: Graph) -> list[RecordedRegion]:
    # Regions are of torch's operators; the name of the technique is read without torch.
    from slipstream.techniques.fusion.recorded import recorded_regions

    return recorded_regions(graph)


def _passes_ns(graph: Graph) -> float:
    """Of the forward and backward passes: what their tasks take."""
    inside = np.isin(graph.tasks.phase, [StepPhase.FORWARD, StepPhase.BACKWARD])
    return float(graph.tasks.duration_ns[inside].sum())


def _assumed(graph: Graph, one: RecordedRegion) -> float:
    """The kernel's duration where nobody measured it: its bytes' share of its operators' time."""
    calls = calls_of(graph, one.tasks)
    before = sum(call.moved_bytes for call in calls)
    before_ns = float(graph.tasks.duration_ns[list(one.tasks)].sum())
    return before_ns * min(one.call.moved_bytes / max(before, 1), 1.0)
