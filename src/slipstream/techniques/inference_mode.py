"""inference_mode: an inference step without the overhead of autograd.

Source: ``torch.inference_mode`` (PyTorch RFC 0011, "InferenceMode"): operators neither create graph
nodes, as under ``torch.no_grad``, nor track views and versions of tensors.
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
# Minimum share of an operator's time that is not autograd's.
_MIN_SHARE = 0.1
_ALREADY = "the step already runs under inference_mode"


@dataclass(frozen=True)
class InferenceMode(TechniqueSettings):
    """Run the step under ``torch.inference_mode``."""

    name: ClassVar[str] = "inference_mode"
    # Wraps the whole forward pass, so it follows techniques that replace modules.
    traits: ClassVar[Traits] = Traits(stage=Stage.MODEL + 1)
    effect: ClassVar[Quality] = Quality(
        QualityKind.EXACT, "the same operators run without autograd's overhead"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why autograd is needed, or already disabled; None otherwise."""
        phases = graph.tasks.phase
        if graph.meta.get("training") or (phases >= StepPhase.BACKWARD).any():
            return "the step trains, which needs autograd"
        if graph.meta.get("inference_mode"):
            return _ALREADY
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return the smallest call of every operator in the recorded and in inference mode."""
        pairs = _representatives(graph, _modes(graph)).values()
        return [call for pair in pairs for call in pair]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Subtract autograd's overhead from every operator, and free activations after use.

        The overhead does not depend on an operator's size, so it is measured on the smallest call,
        where it is the largest share.
        """
        modes = _modes(graph)
        saved: dict[_Key, Price] = {}
        for key, (recorded, inference) in _representatives(graph, modes).items():
            old, new = context.durations.lookup(recorded), context.durations.lookup(inference)
            if old is not None and new is not None and old.nanoseconds > new.nanoseconds:
                difference = old.nanoseconds - new.nanoseconds
                error = math.hypot(old.spread * old.nanoseconds, new.spread * new.nanoseconds)
                saved[key] = Price(difference, error / difference, new.provenance)
        edit = Editor(graph, str(self))
        cheaper = {task: saved[key] for task, key in modes.items() if key in saved}
        for number, overhead in cheaper.items():
            task = graph.task(number)
            removed_ns = min(overhead.nanoseconds, task.duration_ns * (1 - _MIN_SHARE))
            # Nodes are destroyed between operators.
            edit.set_gap(number, max(task.gap_ns - (overhead.nanoseconds - removed_ns), 0.0))
            error_ns = overhead.spread * overhead.nanoseconds
            spread = max(task.spread, error_ns / max(task.duration_ns, 1.0))
            remaining_ns = task.duration_ns - removed_ns
            edit.set_duration(number, remaining_ns, overhead.provenance, spread=min(spread, 0.5))
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
            raise WorkloadError("inference_mode: the step trains, which needs autograd")
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
        """Return a line after the model is constructed."""
        line = "{model}.forward = {torch}.inference_mode()({model}.forward)"
        return CodeChange.of(
            workload,
            lambda where: where.after_model(line),
            by_hand="with torch.inference_mode():\n    output = model(inputs)",
        )


_Key = tuple[str, str, tuple[str, ...]]
"""Recorded mode of an operator, its schema, and the roles of its tensors."""


def _modes(graph: Graph) -> dict[int, _Key]:
    """Return the key of every task whose cost depends on the mode.

    In-place operators are excluded: every repetition of their benchmark would extend autograd's
    graph.
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
    """Whether operators of the step created autograd nodes, shown by increasing numbers."""
    numbers = graph.tasks.sequence[graph.tasks.phase == StepPhase.FORWARD]
    return len(np.unique(numbers[numbers >= 0])) > 1


def _representatives(graph: Graph, modes: dict[int, _Key]) -> dict[_Key, tuple[Call, Call]]:
    """Return the smallest call of every key, in the recorded and in inference mode."""
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
    """Free tensors saved by autograd after their last use; return their number.

    Autograd's nodes live as long as the step's output, so their tensors still exist in the next
    step until that output is replaced; they are removed there too.
    """
    memory, uses = graph.memory, uses_of(graph)
    saved = np.flatnonzero((memory.producer >= 0) & (memory.storage >= 0))
    storage, end = memory.storage[saved].astype(np.int64), memory.release[saved].astype(np.int64)
    last = memory.producer[saved].astype(np.int64)
    spans = uses.between(storage, last, np.where(end >= 0, end, len(graph)))
    np.maximum.at(last, spans.asker, uses.task[spans.place])
    output = flow_of(graph).operands(len(graph) - 1)[1]
    returned = (end < 0) & (last == len(graph) - 1) & np.isin(storage, output)
    freed = (last != end) & ~returned
    edit.release_after(saved[freed], last[freed])
    before, after = memory.handed_on()
    inherited = before[np.isin(after, saved[freed])]
    edit.resize(inherited, np.zeros(len(inherited), np.int64))
    return int(freed.sum())
