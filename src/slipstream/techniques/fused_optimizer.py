"""Fused weight update: one kernel, or one per kind of operation, instead of many.

Source: NVIDIA Apex's FusedAdam; in PyTorch the ``fused`` and ``foreach`` flags of its optimizers.
Modelled as in Daydream (Zhu et al., ATC 2020, section 5.2): one task replaces the update's tasks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from slipstream.durations import Timing
from slipstream.errors import WorkloadError
from slipstream.graph import UNKNOWN_SPREAD, Call, Editor, Graph, Price, Role, StepPhase, price
from slipstream.provenance import Provenance
from slipstream.source import AlreadyAppliedError, EditLocationError, Optimizer, Places, Source
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.techniques._baseline import update_tasks, updated_tensors
from slipstream.workload import BuiltWorkload, Workload

_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
_FOREACH = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
)  # fmt: skip


@dataclass(frozen=True)
class FusedOptimizer(TechniqueSettings):
    """Update all parameters in one fused kernel (``fused``) or in batches (``foreach``)."""

    kind: Literal["fused", "foreach"] = "fused"

    name: ClassVar[str] = "fused_optimizer"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.OPTIMIZER, variants=("fused_optimizer:fused", "fused_optimizer:foreach")
    )
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "the same update; sums may round differently"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why this optimizer cannot be fused; None if it can."""
        described: Any = graph.meta.get("optimizer")
        if not described and (graph.tasks.phase == StepPhase.OPTIMIZER).any():
            return "the step hides its optimizer; return (model, batch, loss, optimizer)"
        if not described or not len(update_tasks(graph)):
            return "the step has no optimizer"
        if described.get("differ"):
            return "its optimizers differ in class or settings; set the flag on each in the code"
        if described["class"] not in self._classes():
            return f"torch has no {self.kind} form of {described['class']}"
        settings = described["settings"]
        if (reason := self._has(settings)) is not None:
            return reason
        if settings.get("differentiable"):
            return "a differentiable optimizer cannot be fused"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the whole update, as recorded and fused."""
        return [_update(graph, {}), _update(graph, self._flags())]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace the update's tasks by one with the micro-benchmarked duration of the update."""
        tasks = update_tasks(graph)
        before = float(graph.tasks.duration_ns[tasks].sum() + graph.tasks.gap_ns[tasks].sum())
        recorded, fused = self.required_timings(graph)
        old, cost = context.durations.lookup(recorded), price(context.durations, fused, before)
        # The fused kernel works in place, so it is as fast alone as in the step. foreach allocates
        # temporaries like the loop, at a cost that depends on the rest of the step, which the
        # ratio accounts for.
        if old is None or not old.nanoseconds:
            cost = Price(before, UNKNOWN_SPREAD, Provenance.ASSUMED)
        elif self.kind == "foreach" and cost.provenance is not Provenance.ASSUMED:
            spread = math.hypot(old.spread, cost.spread)
            cost = replace(cost.at(before / old.nanoseconds), spread=spread)
        edit = Editor(graph, str(self))
        edit.remove(tasks)
        update = edit.put(int(tasks[-1]), fused, cost, name=f"{self.kind} update")
        if len(graph.memory):
            # foreach holds a temporary for all parameters.
            measured = context.durations.lookup(fused)
            nbytes = 0 if self.kind == "fused" else _foreach_bytes(fused, measured)
            edit.allocate(nbytes, Role.TEMPORARY, update, update)
        return edit.apply(f"{len(tasks)} operators of the update in one")

    def apply(self, built: BuiltWorkload) -> None:
        """Set the flag on every parameter group.

        Raises:
            WorkloadError: there is no optimizer, or torch has no such form of it.
        """
        if built.optimizer is None:
            raise WorkloadError(
                "fused_optimizer needs the optimizer, but this workload has none or hides it",
                remedy="return (model, batch, loss, optimizer)",
            )
        kind = type(built.optimizer).__name__
        if kind not in self._classes():
            raise WorkloadError(f"torch has no {self.kind} form of {kind}")
        for optimizer in (built.optimizer, *built.other_optimizers):
            for group in optimizer.param_groups:
                group.update(self._flags())

    def already(self, built: BuiltWorkload) -> str | None:
        """Return why the optimizer needs no flag; None if it does."""
        optimizers = [] if built.optimizer is None else [built.optimizer, *built.other_optimizers]
        reasons = {self._has(group) for optimizer in optimizers for group in optimizer.param_groups}
        return reasons.pop() if len(reasons) == 1 else None

    def code(self, workload: Workload) -> CodeChange | None:
        """Return ``fused=True`` (or ``foreach=True``) at the construction of the optimizers."""
        return CodeChange.of(workload, self._edit, by_hand=self._by_hand, technique=self)

    def _edit(self, where: Places) -> Source:
        source, sites = where.source, self._sites(where)
        if not sites:
            first = where.optimizers[0]
            made = f"'{source.segment(first.call.func)}' makes the optimizer, which needs the flag"
            reason = f"torch has no {self.kind} form of {first.kind}" if first.kind else made
            raise source.location_error(reason, first.call)
        for site in sites:
            # The flags exclude each other; the other one is only written if it is present.
            arguments = {keyword.arg for keyword in site.call.keywords}
            flags = {k: str(v) for k, v in self._flags().items() if v or k in arguments}
            with contextlib.suppress(AlreadyAppliedError):
                source = source.set_keywords(site.call, **flags)
        if source is where.source:
            raise source.already_applied(f"{self.kind}=True is already set", sites[0].call)
        return source

    def _by_hand(self, where: Places) -> str:
        """Return lines that construct the script's optimizers with the flag, or an example."""
        sites = []
        with contextlib.suppress(EditLocationError):
            sites = self._sites(where)
        return (
            "\n".join(
                f"{'optimizer' if site.identity is None else site.identity[1]} = "
                f"{where.source.segment(site.call.func)}(..., {self.kind}=True)"
                for site in sites
            )
            or f"optimizer = torch.optim.AdamW(..., {self.kind}=True)  # or the class you use"
        )

    def _sites(self, where: Places) -> list[Optimizer]:
        """Return the optimizers of the file whose class has the flag."""
        return [site for site in where.optimizers if site.kind in self._classes()]

    def _classes(self) -> tuple[str, ...]:
        return _FUSED if self.kind == "fused" else _FOREACH

    def _has(self, settings: Mapping[str, Any]) -> str | None:
        """Return why an optimizer with these settings needs no flag; None if it does."""
        if settings.get("fused"):
            return "the optimizer is fused already"
        if self.kind == "foreach" and settings.get("foreach"):
            return "the optimizer is foreach already"
        return None

    def _flags(self) -> dict[str, bool]:
        return {"fused": self.kind == "fused", "foreach": self.kind == "foreach"}


def _update(graph: Graph, flags: dict[str, bool]) -> Call:
    described: Any = graph.meta["optimizer"]
    settings = {**described["settings"], **flags}
    if any(described.get("zeros", ())):
        settings["zeros"] = described["zeros"]
    pairs = tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in sorted(settings.items())
    )
    return Call(
        "slipstream::optimizer_step()", (described["class"], pairs, tuple(updated_tensors(graph)))
    )


def _foreach_bytes(update: Call, measured: Timing | None) -> int:
    """Return the peak temporary memory of a foreach update, measured or as torch documents it.

    The latter is the size of the parameters of a dtype; dtypes are updated sequentially.
    """
    if measured is not None and measured.workspace is not None:
        return measured.workspace
    by_dtype: dict[str, int] = {}
    for spec in update.arguments[2]:
        by_dtype[spec.dtype] = by_dtype.get(spec.dtype, 0) + spec.nbytes
    return max(by_dtype.values(), default=0)
