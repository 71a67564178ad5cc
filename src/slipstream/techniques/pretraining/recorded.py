"""Recorded steps over fewer rows of tokens: calls, heads and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.graph import Call, Editor, Graph, Role, StepPhase, TensorSpec
from slipstream.graph.flow import Flow, Match

_LOSSES = ("aten::_log_softmax", "aten::nll_loss_forward", "aten::nll_loss_nd")
_SCATTERED = ("aten::embedding", "aten::bmm", "aten::_softmax", "aten::baddbmm")
"""Operators that mix rows, or begin the model."""
ATTENTION = "aten::_scaled_dot_product"
_CHANGED_ROLES = (Role.ACTIVATION, Role.TEMPORARY)


@dataclass(frozen=True)
class Rows:
    """A batch [batch, length] of which `rows` rows of tokens remain, as [1, rows]."""

    batch: int
    length: int
    rows: int

    @property
    def share(self) -> float:
        """Remaining share of the rows."""
        return self.rows / (self.batch * self.length)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a shape with the remaining rows; unchanged if it has no row per token."""
        full = self.batch * self.length
        if full in shape:
            at = list(shape).index(full)
            return (*shape[:at], self.rows, *shape[at + 1 :])
        if shape and shape[0] == self.batch and self.length in shape[1:]:
            at = list(shape).index(self.length, 1)
            return (1, *shape[1:at], self.rows, *shape[at + 1 :])
        return tuple(shape)

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """Return a tensor with the remaining rows, with dimensions in the same order in memory."""
        shape = self.shape(spec.shape)
        return spec if shape == spec.shape else spec.resized(shape)

    def call(self, call: Call) -> Call:
        """Return a call on the remaining rows."""
        outputs = tuple(map(self.spec, call.outputs))
        return Call(call.op, tuple(map(self._argument, call.arguments)), outputs)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return self.spec(value)
        if isinstance(value, (list, tuple)):
            if value and all(type(item) is int for item in value):
                return self.shape(value)
            return tuple(map(self._argument, value))
        return value

    def calls(self, graph: Graph, tasks: Sequence[int]) -> dict[int, Call]:
        """Return the new call of each of `tasks` with rows of tokens."""
        made: dict[int, Call] = {}
        changed = {}
        for task, number in zip(tasks, graph.tasks.call[list(tasks)].tolist(), strict=True):
            if number >= 0:
                if number not in made:
                    made[number] = self.call(graph.calls[number])
                if made[number] != graph.calls[number]:
                    changed[task] = made[number]
        return changed

    def resize(self, edit: Editor, graph: Graph, tasks: Sequence[int]) -> None:
        """Shrink what `tasks` allocate."""
        memory = graph.memory
        rows = np.flatnonzero(
            np.isin(memory.producer, list(tasks)) & np.isin(memory.role, _CHANGED_ROLES)
        )
        if len(rows):
            edit.resize(rows, np.rint(memory.nbytes[rows] * self.share))


def rows_of(graph: Graph, count: Callable[[dict[str, Any]], int | None]) -> Rows | None:
    """Return the remaining rows, by the recorded tokens; None if `count` returns None.

    None also for a batch that another technique changed to a fraction of the recorded one.
    """
    tokens: Any = graph.meta.get("tokens") or {}
    remaining = count(tokens) if tokens else None
    if remaining is None:
        return None
    times, fraction = divmod(graph.samples, tokens["shape"][0])
    if fraction or not times:
        return None
    return Rows(times * tokens["shape"][0], tokens["shape"][1], times * remaining)


def heads(flow: Flow) -> Iterator[Match]:
    """Find the operators from the last residual connection to the loss of tokens."""
    graph = flow.graph
    rows = rows_of(graph, lambda tokens: 0)
    if rows is None:
        return

    def has_rows(spec: TensorSpec) -> bool:
        return rows.shape(spec.shape) != spec.shape

    in_forward = (graph.tasks.phase == StepPhase.FORWARD).tolist()
    losses = ((task, flow.call(task)) for task in flow.calling(_LOSSES, StepPhase.FORWARD).tolist())
    region = {task for task, call in losses if call is not None and has_rows(call.inputs[0])}
    for task in range(max(region, default=-1), -1, -1):
        maker, readers = flow.call(task), set(flow.readers[task])
        if task in region or maker is None or flow.views[task] or not readers & region:
            continue
        if not in_forward[task] or not maker.outputs or not has_rows(maker.outputs[0]):
            continue
        mixes = maker.name.startswith((*_SCATTERED, ATTENTION))
        if mixes or sum(map(has_rows, maker.inputs)) > 1:
            break
        if any(in_forward[reader] and reader not in region for reader in readers):
            break
        region.add(task)
    if not region:
        return
    forward = tuple(sorted(region))
    backward = sorted({b for task in forward for b in flow.backward[task]})
    first, last = (graph.task(task) for task in (forward[0], forward[-1]))
    x, y = first.known_call.inputs[0], last.known_call.inputs[0]
    yield Match("head", first.module.partition(".")[2], forward, tuple(backward), x, y, {})
