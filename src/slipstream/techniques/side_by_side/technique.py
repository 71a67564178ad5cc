"""side_by_side: optimizer steps interleaved with the gradients of earlier layers.

Source: Li et al., "Automatic Horizontal Fusion for GPU Kernels", CGO 2022; here on a CPU.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from slipstream.codegen import why_no_compiler
from slipstream.errors import WorkloadError
from slipstream.graph import Call, Editor, Graph, StepPhase
from slipstream.graph.flow import Match
from slipstream.graph.layers import module_layers
from slipstream.technique import (
    CodeChange,
    Context,
    ModuleTechnique,
    Quality,
    QualityKind,
    Stage,
    Traits,
)
from slipstream.techniques._baseline import (
    already_autocast,
    already_compiled,
    update_tasks,
    updated_tensors,
)
from slipstream.techniques.side_by_side.timing import MAX_RATIO, pair_call
from slipstream.units import format_duration, format_percent
from slipstream.workload import BuiltWorkload, Workload

_BY_HAND = (
    "from slipstream.techniques.side_by_side.nn import interleave_updates\n"
    "interleave_updates([m for m in model.modules() if type(m) is torch.nn.Linear], optimizer)"
)


@dataclass(frozen=True)
class SideBySide(ModuleTechnique):
    """Interleaving of memory-bound weight updates with compute-bound gradients.

    Attributes:
        only, except_: patterns of linear layers' qualified names.
    """

    only: str = "*"
    except_: str = ""

    name: ClassVar[str] = "side_by_side"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.OPTIMIZER,
        conflicts=frozenset({"accumulation", "amp", "compile", "ddp", "fsdp", "fusion"}),
    )
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "the same products and updates; sums may round differently"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no update can be interleaved with gradients; None if one can."""
        from slipstream.techniques.side_by_side.updates import why_no_loop

        for reason in (already_compiled(graph), already_autocast(graph)):
            if reason is not None:
                return reason
        if (reason := why_no_compiler()) is not None:
            return f"loops are generated in C++, and {reason}"
        if int(graph.meta.get("threads", 1)) > 1:
            return "the loops are single-threaded, and the step uses several threads"
        described: Any = graph.meta.get("optimizer")
        update = update_tasks(graph)
        if not described or not len(update):
            return "the step has no optimizer, or hides it, so there are no updates to interleave"
        if (reason := why_no_loop(described["class"], described["settings"])) is not None:
            return reason
        if len(update) > 1 and not any("_fused_" in graph.task(int(t)).name for t in update):
            return (
                f"its update consists of {len(update)} operators; fuse them first: "
                "fused_optimizer+side_by_side"
            )
        between = _between(graph, int(update[0]))
        if between:
            return (
                f"an operator between the backward pass and the update ({between}) reads gradients"
            )
        unpaired = "its backward pass has no two linear layers with sizes that fill whole tiles"
        if (reason := self.no_match_reason(module_layers(graph), unpaired)) is not None:
            return reason
        return None if self._sites(graph) else unpaired

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return every pair, sequential and interleaved."""
        return [call for pair in self._pairs(graph) for call in pair.calls]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace the durations of gradients by those of faster pairs, and shorten the update."""
        edit = Editor(graph, str(self))
        update = update_tasks(graph)
        update_ns = float(graph.tasks.duration_ns[update].sum())
        hidden_share, faster, pairs = 0.0, 0, self._pairs(graph)
        for pair in pairs:
            ratio = context.durations.ratio(*pair.calls)
            if ratio is None or ratio.value > MAX_RATIO:
                continue
            products = list(pair.site.tasks)
            alone_ns = float(graph.tasks.duration_ns[products].sum())
            share = pair.count / pair.trained
            edit.scale(
                np.array(products), ratio.value * (1 + share * update_ns / alone_ns),
                ratio.provenance, spread=ratio.spread,
            )  # fmt: skip
            hidden_share += share
            faster += 1
            provenance = ratio.provenance
        if faster:
            edit.scale(update, max(1 - hidden_share, 0.0), provenance)
        limit = f"the update takes {format_duration(update_ns)}, which limits what can be hidden"
        percent = format_percent(hidden_share)
        outcome = f"{percent} of the update interleaved with gradients of {faster} layers"
        if not faster:
            outcome = f"none of {len(pairs)} pairs is faster"
        return edit.apply(f"{outcome}; {limit}")

    def apply(self, built: BuiltWorkload) -> None:
        """Interleave pending updates with the gradients of linear layers.

        Every pair is timed sequential and interleaved, once per machine, and interleaved only if
        that is faster.

        Raises:
            WorkloadError: the step hides its model or optimizer, is a user-defined function, or
                its optimizer is not supported.
        """
        from torch import nn

        from slipstream.techniques.side_by_side.nn import interleave_updates
        from slipstream.techniques.side_by_side.timing import is_faster
        from slipstream.techniques.side_by_side.updates import why_no_loop

        built.need_model(self.name)
        if built.optimizer is None or not built.from_parts:
            raise WorkloadError(
                f"{self.name} updates weights during the backward pass, and your own step may read "
                "or accumulate gradients after it",
                remedy="return (model, batch, loss, optimizer)",
            )
        for group in built.optimizer.param_groups:
            if (reason := why_no_loop(type(built.optimizer).__name__, group)) is not None:
                raise WorkloadError(f"{self.name}: {reason}")
        layers = {n: m for n, m in built.model.named_modules() if type(m) is nn.Linear}
        self.require_match(layers)
        chosen = [m for n, m in layers.items() if n in self.selection]
        interleave_updates(chosen, built.optimizer, is_faster)

    def warmup_steps(self) -> int:
        """Return 1: the first step times the pairs that have no stored duration."""
        return 1

    def code(self, workload: Workload) -> CodeChange | None:
        """Return two lines to add after the optimizer is constructed."""
        note = (
            "add after the optimizer is constructed, if nothing reads gradients before its step:\n"
            f"{_BY_HAND}"
        )
        return None if workload.live is not None else CodeChange("", note)

    def _sites(self, graph: Graph) -> list[Match]:
        """Return the supported layers in the order of the backward pass."""
        from slipstream.techniques.side_by_side.nn import has_whole_tiles

        layers = module_layers(graph)
        calls = Counter(layer.module for layer in layers)
        fitting = [
            layer
            for layer in self.chosen(layers)
            if layer.kind == "linear"
            and layer.backward
            and has_whole_tiles(layer.x.shape[0], layer.settings.outputs, layer.x.shape[1])
            and calls[layer.module] == 1
        ]
        return sorted(fitting, key=lambda site: site.backward[0]) if len(fitting) > 1 else []

    def _pairs(self, graph: Graph) -> list[Pair]:
        """Pair each layer's gradients with the update of the layer before it in backward."""
        from slipstream.techniques.side_by_side.updates import update_kind

        described: Any = graph.meta["optimizer"]
        kind = update_kind(described["class"], described["settings"])
        sites = self._sites(graph)
        trained = sum(spec.nbytes for spec in updated_tensors(graph)) // 4
        return [
            Pair(kind, site, math.prod(before.settings.weight_shape(before.x)), trained)
            for before, site in itertools.pairwise(sites)
        ]


@dataclass(frozen=True)
class Pair:
    """Gradients of a layer and the update of another layer's weight.

    Attributes:
        kind: kind of the update, see `slipstream.techniques.side_by_side.updates.update_kind`.
        count: number of updated parameters, of `trained` in the optimizer.
    """

    kind: str
    site: Match
    count: int
    trained: int

    @property
    def calls(self) -> tuple[Call, Call]:
        """The sequential and the interleaved call."""
        rows, inputs = self.site.x.shape
        needs_input = len(self.site.backward) > 1
        layer = rows, self.site.settings.outputs, inputs, needs_input
        shape = self.kind, *layer, self.count, self.trained
        return pair_call(*shape, together=False), pair_call(*shape, together=True)


def _between(graph: Graph, update: int) -> str:
    """Return the name of an operator between the backward pass and the update; empty if none."""
    last = int(np.flatnonzero(graph.tasks.phase == StepPhase.BACKWARD).max(initial=-1))
    for task in range(last + 1, update):
        view = graph.task(task)
        if view.call is not None and any(len(spec.shape) for spec in view.call.inputs):
            return view.name
    return ""
