"""inference_mode: an inference step without autograd's book-keeping.

Source: ``torch.inference_mode`` (PyTorch RFC 0011, "InferenceMode"): operators neither make nodes
of a graph, as under ``torch.no_grad``, nor track views and versions of tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from slipstream.errors import WorkloadError
from slipstream.graph import Call, Editor, Graph, Price, StepPhase
from slipstream.graph.flow import flow_of
from slipstream.graph.uses import uses_of
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

_IN_MODE = "slipstream::in_mode()"
# What is left of an operator at least: its own work is never autograd's.
_WORK = 0.1
_ALREADY = "the step runs under inference_mode already"


@dataclass(frozen=True)
class InferenceMode(TechniqueSettings):
    """Run the step under ``torch.inference_mode``."""

    name: ClassVar[str] = "inference_mode"
    # Around the whole forward pass: after what puts other modules in the place of the model's.
    traits: ClassVar[Traits] = Traits(stage=Stage.MODEL + 1)
    effect: ClassVar[Quality] = Quality(
        QualityKind.EXACT, "the same operators run; only book-keeping is left out"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why autograd is needed, or not there."""
        phases = graph.tasks.phase
        if graph.meta.get("training") or (phases >= StepPhase.BACKWARD).any():
            return "the step trains: autograd is needed"
        if graph.meta.get("inference_mode"):
            return _ALREADY
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """The smallest call of every operator in the mode it ran in, and in inference mode."""
        asked = _representatives(graph, _modes(graph)).values()
        return [call for pair in asked for call in pair]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Take off every operator what autograd costs it; activations are freed after use.

        What an operator saves does not depend on its size, so that the difference is measured on
        its smallest call, where it stands out most.
        """
        modes = _modes(graph)
        saved: dict[_Key, Price] = {}
        for key, (now, then) in _representatives(graph, modes).items():
            old, new = context.durations.lookup(now), context.durations.lookup(then)
            if old is not None and new is not None and old.nanoseconds > new.nanoseconds:
                difference = old.nanoseconds - new.nanoseconds
                error = math.hypot(old.spread * old.nanoseconds, new.spread * new.nanoseconds)
                saved[key] = Price(difference, error / difference, new.provenance)
        edit = Editor(graph, str(self))
        cheaper = {task: saved[key] for task, key in modes.items() if key in saved}
        for number, spared in cheaper.items():
            task = graph.task(number)
            taken_ns = min(spared.nanoseconds, task.duration_ns * (1 - _WORK))
            # Nodes are unmade between operators.
            edit.set_gap(number, max(task.gap_ns - (spared.nanoseconds - taken_ns), 0.0))
            error_ns = spared.spread * spared.nanoseconds
            spread = max(task.spread, error_ns / max(task.duration_ns, 1.0))
            left_ns = task.duration_ns - taken_ns
            edit.set_duration(number, left_ns, spared.provenance, spread=min(spread, 0.5))
        freed = _free_early(graph, edit) if _records_autograd(graph) else 0
        what = f"{len(cheaper)} operators without autograd"
        return edit.apply(
            what + (f", {freed} activations freed after their last use" * bool(freed))
        )

    def apply(self, built: BuiltWorkload) -> None:
        """Run the step under ``torch.inference_mode``.

        Raises:
            WorkloadError: the step trains.
        """
        import torch

        if built.training:
            raise WorkloadError("inference_mode: the step trains, it needs autograd")
        if built.from_script:
            built.model.forward = torch.inference_mode()(built.model.forward)
            return
        step = built.step

        @functools.wraps(step)
        def inferring() -> Any:
            with torch.inference_mode():
                return step()

        built.step = inferring

    def code(self, workload: Workload) -> CodeChange | None:
        """One line after the model is made."""
        line = "{model}.forward = {torch}.inference_mode()({model}.forward)"
        return CodeChange.of(
            workload,
            lambda where: where.after_model(line),
            by_hand="with torch.inference_mode():\n    output = model(inputs)",
        )


_Key = tuple[str, str, tuple[str, ...]]
"""The mode an operator ran in, its schema, and what its tensors are."""


def _modes(graph: Graph) -> dict[int, _Key]:
    """Of every task whose cost depends on the mode, in which it ran and on what.

    Operators that write to their inputs are left out: autograd would make their benchmark's graph
    longer with every repetition.
    """
    flow = flow_of(graph)
    parameters = flow.parameters
    numbers = graph.tasks.sequence
    tracing = _records_autograd(graph)
    activations: set[int] = set()
    modes: dict[int, _Key] = {}
    for t in range(len(graph)):
        call = flow.call(t)
        if call is None:
            continue
        inputs, outputs = flow.operands(t)
        roles = tuple(
            "parameter" if s in parameters else "activation" if s in activations else "other"
            for s in inputs
        )
        traced = any(role != "other" for role in roles)
        activations.difference_update(outputs)
        if traced:
            activations.update(s for s in outputs if s not in parameters)
        mode = "grad" if tracing and traced and numbers[t] >= 0 else "no_grad"
        if call.inputs and "!" not in call.op:
            modes[t] = (mode, call.op, roles)
    return modes


def _records_autograd(graph: Graph) -> bool:
    """Whether operators of the step made nodes for a backward pass: their numbers go up."""
    numbers = graph.tasks.sequence[graph.tasks.phase == StepPhase.FORWARD]
    return len(np.unique(numbers[numbers >= 0])) > 1


def _representatives(graph: Graph, modes: dict[int, _Key]) -> dict[_Key, tuple[Call, Call]]:
    """For every key its smallest call, in the mode it ran in and in inference mode."""
    smallest: dict[_Key, Call] = {}
    for task, key in modes.items():
        call = graph.task(task).known_call
        if key not in smallest or call.moved_bytes < smallest[key].moved_bytes:
            smallest[key] = call
    return {
        key: (_in_mode(key[0], call, key[2]), _in_mode("inference", call, key[2]))
        for key, call in smallest.items()
    }


def _in_mode(mode: str, call: Call, roles: tuple[str, ...]) -> Call:
    return Call(_IN_MODE, (mode, call.op, call.arguments, roles), call.outputs)


def _free_early(graph: Graph, edit: Editor) -> int:
    """Let what autograd holds on to be freed after the last task that uses it; how many are.

    The nodes of a graph live as long as the step's output. What they kept is still there in the
    next step until that output is replaced; it is taken away there too.
    """
    memory, uses = graph.memory, uses_of(graph)
    kept = np.flatnonzero((memory.producer >= 0) & (memory.storage >= 0))
    storage, end = memory.storage[kept].astype(np.int64), memory.release[kept].astype(np.int64)
    last = memory.producer[kept].astype(np.int64)
    spans = uses.between(storage, last, np.where(end >= 0, end, len(graph)))
    np.maximum.at(last, spans.asker, uses.task[spans.place])
    output = flow_of(graph).operands(len(graph) - 1)[1]
    returned = (end < 0) & (last == len(graph) - 1) & np.isin(storage, output)
    freed = (last != end) & ~returned
    edit.release_after(kept[freed], last[freed])
    before, after = memory.handed_on()
    gone = before[np.isin(after, kept[freed])]
    edit.resize(gone, np.zeros(len(gone), np.int64))
    return int(freed.sum())
