"""torch.compile: a few compiled functions of the model's operators, fused to save memory traffic.

Source: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
Transformation and Graph Compilation", ASPLOS 2024; ``torch.compile`` with its Inductor backend.
Predicted from compiled regions that a profile measured on request (`slipstream.capture.regions`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.capture import covered_tasks, max_repeats, use_compiled
from slipstream.graph import Editor, Graph, Kind, Role
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
from slipstream.techniques._baseline import is_compiled
from slipstream.units import format_duration
from slipstream.workload import BuiltWorkload, Workload

# If other techniques changed the operators of a compiled region.
_SCALED_SPREAD = 0.15
_UNCHANGED = 1e-6


@dataclass(frozen=True)
class Compile(TechniqueSettings):
    """Compile the model; ``mode`` is the mode of ``torch.compile``, with underscores."""

    mode: Literal["default", "reduce_overhead", "max_autotune"] = "default"

    name: ClassVar[str] = "compile"
    traits: ClassVar[Traits] = Traits(stage=Stage.COMPILE, needs=frozenset({"regions"}))
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "the same operators, fused: sums may round differently"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why the compiled step is unknown or impossible; None if it is known."""
        if self.mode == "reduce_overhead":
            return "reduce_overhead saves launches of GPU kernels; on a CPU it is compile:default"
        if is_compiled(graph):
            return "the model is compiled already"
        recorded: Any = graph.meta.get("regions")
        if recorded is None:
            return "compiled regions are not recorded; slipstream advise WORKLOAD --record regions"
        if recorded.get("reason"):
            remedy = recorded.get("remedy")
            return str(recorded["reason"]) + (f"; {remedy}" if remedy else "")
        if self.mode != recorded["mode"]:
            return f"regions are recorded for compile:{recorded['mode']} alone; prove measures it"
        return None

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace the model's tasks by the compiled regions and the overhead of their calls."""
        recorded: Any = graph.meta["regions"]
        covered = covered_tasks(graph, {(module, name) for module, name in recorded["stays"]})
        passes = max_repeats(graph, covered["forward"]) // recorded["repeats"]
        edit = Editor(graph, str(self))
        handles: dict[str, list[int]] = {}
        for phase, tasks in covered.items():
            for task in tasks:
                edit.remove(int(task))
            if not len(tasks):
                continue
            first = int(tasks[0])
            if phase == "forward" and recorded["overhead_ns"]:
                edit.insert(
                    first, "guards and wrappers", passes * recorded["overhead_ns"],
                    Provenance.MICROBENCHMARK, before=True, kind=Kind.HOST,
                )  # fmt: skip
            factor = _factor(graph, tasks, recorded["covered_ns"][phase])
            regions = [region for region in recorded["regions"] if region["phase"] == phase]
            for number, region in enumerate(regions):
                spread, provenance = region["spread"], Provenance.MICROBENCHMARK
                if factor != 1.0:
                    spread, provenance = math.hypot(spread, _SCALED_SPREAD), Provenance.ASSUMED
                handle = edit.insert(
                    first, f"compiled {phase} {number}", factor * region["ns"], provenance,
                    before=True, spread=spread,
                )  # fmt: skip
                handles.setdefault(phase, []).append(handle)
        if len(graph.memory):
            share = 1.0
            if graph.samples and recorded["samples"] and passes:
                share = graph.samples / recorded["samples"] / passes
            self._save(edit, recorded, share, handles)
        return edit.apply(_description(recorded, sum(map(len, covered.values()))))

    @staticmethod
    def _save(
        edit: Editor, recorded: dict[str, Any], share: float, handles: dict[str, list[int]]
    ) -> None:
        """Allocate what each forward region saves for its backward, scaled by `share`."""
        if not handles.get("forward") or not handles.get("backward"):
            return
        regions = [region for region in recorded["regions"] if region["phase"] == "forward"]
        for handle, region in zip(handles["forward"], regions, strict=True):
            # Compiled backward functions run in reverse; the last one frees the tensors.
            edit.allocate(
                round(region["saved_bytes"] * share), Role.ACTIVATION, handle,
                handles["backward"][-1],
            )  # fmt: skip

    def apply(self, built: BuiltWorkload) -> None:
        """Compile the model with torch.compile; compilation runs in the first step.

        Raises:
            WorkloadError: the step hides its model, or the model is already compiled.
        """
        built.need_model(self.name)
        use_compiled(built.model, mode=self._mode)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return a line after the model is constructed."""
        mode = "" if self.mode == "default" else f', mode="{self._mode}"'

        def edit(where: Places) -> Source:
            return where.with_named_model().after_model(
                f"{{model}} = {{torch}}.compile({{model}}{mode})"
            )

        return CodeChange.of(
            workload, edit, by_hand=f"model = torch.compile(model{mode})", note=_note,
            technique=self,
        )  # fmt: skip

    @property
    def _mode(self) -> str:
        return self.mode.replace("_", "-")


def _note(where: Places) -> str:
    if not {"state_dict", "load_state_dict"} & where.source.names.attributes:
        return ""
    return (
        "state_dict() of the compiled model adds '_orig_mod.' to every name: save and load the "
        "weights of model._orig_mod to keep checkpoints the same"
    )


def _factor(graph: Graph, tasks: NDArray[np.int64], recorded_ns: float) -> float:
    """Return the ratio of the covered tasks' time, after earlier edits, to the recorded one."""
    if not recorded_ns:
        return 1.0
    factor = float(graph.tasks.duration_ns[tasks].sum()) / recorded_ns
    return 1.0 if abs(factor - 1) < _UNCHANGED else factor


def _description(recorded: dict[str, Any], removed: int) -> str:
    """Describe the compiled step, and when compilation is amortised."""
    regions, breaks = len(recorded["regions"]), len(recorded["breaks"])
    description = f"{removed} operators in {regions} compiled region{'s' * (regions != 1)}"
    if breaks:
        description += f" ({breaks} graph break{'s' * (breaks != 1)})"
    duration = format_duration(recorded["compile_s"] * 1e9)
    description += f"; compilation took {duration} of CPU time" + (
        " with a warm cache" if recorded["cached"] else ""
    )
    saved_ns = recorded["eager_ns"] - recorded["compiled_ns"]
    if saved_ns <= 0:
        return description + ", which is never amortised here"
    return (
        description + f", amortised after {math.ceil(recorded['compile_s'] * 1e9 / saved_ns)} steps"
    )
