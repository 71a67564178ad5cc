"""side_by_side: an optimizer's step in the loops that multiply gradients of layers before it.

Source: Li et al., "Automatic Horizontal Fusion for GPU Kernels", CGO 2022; here on a processor.
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
from slipstream.technique import Choosing, CodeChange, Context, Quality, QualityKind, Stage, Traits
from slipstream.techniques._baseline import (
    already_autocast,
    already_compiled,
    update_tasks,
    updated_tensors,
)
from slipstream.techniques.side_by_side.timing import MOST, pair_call
from slipstream.units import format_duration, format_percent
from slipstream.workload import BuiltWorkload, Workload

_BY_HAND = (
    "from slipstream.techniques.side_by_side.nn import put_beside\n"
    "put_beside([m for m in model.modules() if type(m) is torch.nn.Linear], optimizer)"
)


@dataclass(frozen=True)
class SideBySide(Choosing):
    """Updates of weights, which wait for memory, beside products of gradients, which compute.

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
        """None, or why no kernels of the step can run side by side."""
        from slipstream.techniques.side_by_side.updates import why_no_loop

        for reason in (already_compiled(graph), already_autocast(graph)):
            if reason is not None:
                return reason
        if (reason := why_no_compiler()) is not None:
            return f"loops are generated in C++, and {reason}"
        if int(graph.meta.get("threads", 1)) > 1:
            return "the loops are of one thread, and the step has several"
        described: Any = graph.meta.get("optimizer")
        update = update_tasks(graph)
        if not described or not len(update):
            return "the step has, or shows, no optimizer: nothing beside its products waits"
        if (reason := why_no_loop(described["class"], described["settings"])) is not None:
            return reason
        if len(update) > 1 and not any("_fused_" in graph.task(int(t)).name for t in update):
            return (
                f"its update is {len(update)} operators; fused_optimizer makes it one first: "
                "fused_optimizer+side_by_side"
            )
        between = _between(graph, int(update[0]))
        if between:
            return f"gradients are read before the update ({between}), which would be too late"
        unpaired = "no linear layers of whole vectors follow each other in its backward pass"
        if (reason := self.why_none_of(module_layers(graph), unpaired)) is not None:
            return reason
        return None if self._sites(graph) else unpaired

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Every pair in turn and in one loop."""
        return [call for pair in self._pairs(graph) for call in pair.calls]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Products as long as both in one loop where that is shorter; the rest of the update."""
        edit = Editor(graph, str(self))
        update = update_tasks(graph)
        update_ns = float(graph.tasks.duration_ns[update].sum())
        taken, merged, pairs = 0.0, 0, self._pairs(graph)
        for pair in pairs:
            ratio = context.durations.ratio(*pair.calls)
            if ratio is None or ratio.value > MOST:
                continue
            products = list(pair.site.tasks)
            alone_ns = float(graph.tasks.duration_ns[products].sum())
            share = pair.count / pair.trained
            edit.scale(
                np.array(products), ratio.value * (1 + share * update_ns / alone_ns),
                ratio.provenance, spread=ratio.spread,
            )  # fmt: skip
            taken += share
            merged += 1
            provenance = ratio.provenance
        if merged:
            edit.scale(update, max(1 - taken, 0.0), provenance)
        hidden = f"the update is {format_duration(update_ns)}, all that could be hidden"
        words = f"{format_percent(taken)} of the update beside {merged} layers' products"
        return edit.apply(f"{words if merged else f'none of {len(pairs)} pairs pays'}; {hidden}")

    def apply(self, built: BuiltWorkload) -> None:
        """Let linear layers run what the optimizer owes beside their gradients' products.

        Every pair is timed in turn and in one loop, once a machine, and is one only where faster.

        Raises:
            WorkloadError: the step hides its model or optimizer, is the user's own function, or
                its optimizer has no loop here.
        """
        from torch import nn

        from slipstream.techniques.side_by_side.nn import put_beside
        from slipstream.techniques.side_by_side.timing import pays
        from slipstream.techniques.side_by_side.updates import why_no_loop

        built.need_model(self.name)
        if built.optimizer is None or not built.from_parts:
            raise WorkloadError(
                f"{self.name} updates weights during the backward pass, and your own step may read "
                "or add up gradients after it",
                remedy="return (model, batch, loss, optimizer)",
            )
        for group in built.optimizer.param_groups:
            if (reason := why_no_loop(type(built.optimizer).__name__, group)) is not None:
                raise WorkloadError(f"{self.name}: {reason}")
        layers = {n: m for n, m in built.model.named_modules() if type(m) is nn.Linear}
        self.need_some(layers)
        chosen = [m for n, m in layers.items() if n in self.selection]
        put_beside(chosen, built.optimizer, pays)

    def warmup_steps(self) -> int:
        """The first, in which pairs are timed that no prediction has asked for."""
        return 1

    def code(self, workload: Workload) -> CodeChange | None:
        """Two lines after the optimizer is made."""
        note = f"after the optimizer is made, where nothing reads gradients before it:\n{_BY_HAND}"
        return None if workload.live is not None else CodeChange("", note)

    def _sites(self, graph: Graph) -> list[Match]:
        """Layers with whole vectors, in the order of the backward pass."""
        from slipstream.techniques.side_by_side.nn import able

        every = module_layers(graph)
        calls = Counter(layer.module for layer in every)
        fitting = [
            layer
            for layer in self.chosen(every)
            if layer.kind == "linear"
            and layer.backward
            and able(layer.x.shape[0], layer.settings.outputs, layer.x.shape[1])
            and calls[layer.module] == 1
        ]
        return sorted(fitting, key=lambda site: site.backward[0]) if len(fitting) > 1 else []

    def _pairs(self, graph: Graph) -> list[Pair]:
        """Each layer's products with the update of the layer whose gradient came before."""
        from slipstream.techniques.side_by_side.updates import form

        described: Any = graph.meta["optimizer"]
        kind = form(described["class"], described["settings"])
        sites = self._sites(graph)
        trained = sum(spec.nbytes for spec in updated_tensors(graph)) // 4
        return [
            Pair(kind, site, math.prod(before.settings.weight_shape(before.x)), trained)
            for before, site in itertools.pairwise(sites)
        ]


@dataclass(frozen=True)
class Pair:
    """Products of a layer's gradients, and the update of another layer's weight.

    Attributes:
        kind: of the update, as it is timed.
        count: numbers that are updated, of `trained` that the optimizer has.
    """

    kind: str
    site: Match
    count: int
    trained: int

    @property
    def calls(self) -> tuple[Call, Call]:
        """In turn, and in one loop."""
        rows, inputs = self.site.x.shape
        wants_input = len(self.site.backward) > 1
        layer = rows, self.site.settings.outputs, inputs, wants_input
        shape = self.kind, *layer, self.count, self.trained
        return pair_call(*shape, together=False), pair_call(*shape, together=True)


def _between(graph: Graph, update: int) -> str:
    """What runs after the backward pass and before the update."""
    last = int(np.flatnonzero(graph.tasks.phase == StepPhase.BACKWARD).max(initial=-1))
    for task in range(last + 1, update):
        view = graph.task(task)
        if view.call is not None and any(len(spec.shape) for spec in view.call.inputs):
            return view.name
    return ""
