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

    def shape(self, shape: Sequence[int], other: Sequence[int] = ()) -> tuple[int, ...]:
        """Return a shape with the remaining rows; unchanged if it has no row per token.

        Args:
            other: the shape at another number of samples, if known: an extent that is the same in
                both, such as a width that happens to equal the number of tokens, is not of rows.
        """
        full = self.batch * self.length
        others: Sequence[Any] = other if len(other) == len(shape) else [None] * len(shape)
        sized = [a != b for a, b in zip(shape, others, strict=True)]
        for at, extent in enumerate(shape):
            if extent == full and sized[at]:
                return (*shape[:at], self.rows, *shape[at + 1 :])
        if shape and shape[0] == self.batch and sized[0] and self.length in shape[1:]:
            at = list(shape).index(self.length, 1)
            return (1, *shape[1:at], self.rows, *shape[at + 1 :])
        return tuple(shape)

    def call(self, call: Call, other: Call | None = None) -> Call:
        """Return a call on the remaining rows; `other` is the call at another number of samples."""
        arguments = self._each(call.arguments, other and other.arguments)
        return Call(call.op, arguments, self._each(call.outputs, other and other.outputs))

    def _each(self, values: Sequence[Any], others: Any) -> tuple[Any, ...]:
        if not isinstance(others, (list, tuple)) or len(others) != len(values):
            others = [None] * len(values)
        return tuple(map(self._argument, values, others))

    def _argument(self, value: Any, other: Any) -> Any:
        if isinstance(value, TensorSpec):
            # Dimensions keep their order in memory.
            shape = self.shape(value.shape, other.shape if isinstance(other, TensorSpec) else ())
            return value if shape == value.shape else value.resized(shape)
        if isinstance(value, (list, tuple)):
            if value and all(type(item) is int for item in value):
                return self.shape(value, other or ())
            return self._each(value, other)
        return value

    def calls(self, graph: Graph, tasks: Sequence[int]) -> dict[int, Call]:
        """Return the new call of each of `tasks` with rows of tokens."""
        others = _other_calls(graph)
        made: dict[int, Call] = {}
        changed = {}
        for task, number in zip(tasks, graph.tasks.call[list(tasks)].tolist(), strict=True):
            if number >= 0:
                if number not in made:
                    made[number] = self.call(graph.calls[number], others[number])
                if made[number] != graph.calls[number]:
                    changed[task] = made[number]
        return changed

    def resize(self, edit: Editor, graph: Graph, tasks: Sequence[int]) -> None:
        """Shrink what `tasks` allocate, but for gradients that leave them."""
        memory = graph.memory
        leaves = graph.tasks.phase[memory.producer] == StepPhase.BACKWARD
        leaves &= memory.release > max(tasks, default=-1)
        shrunk = np.isin(memory.producer, list(tasks)) & np.isin(memory.role, _CHANGED_ROLES)
        rows = np.flatnonzero(shrunk & ~leaves)
        if len(rows):
            edit.resize(rows, np.rint(memory.nbytes[rows] * self.share))


def rows_of(graph: Graph, count: Callable[[dict[str, Any]], int | None]) -> Rows | None:
    """Return the remaining rows, by the step's tokens; None if `count` returns None."""
    tokens = tokens_of(graph)
    remaining = count(tokens) if tokens else None
    if remaining is None:
        return None
    batch, length = tokens["shape"]
    return Rows(batch, length, remaining)


def tokens_of(graph: Graph) -> dict[str, Any]:
    """Return ``shape``, ``labelled`` and ``lengths`` of the batch; empty if unknown.

    Those of a batch of another size than the recorded one have the same mix of lengths.
    """
    recorded: Any = graph.meta.get("tokens") or {}
    if not recorded or graph.samples in (0, recorded["shape"][0]):
        return dict(recorded)
    rows, length = recorded["shape"]
    share = rows / graph.samples
    ordered, labelled = sorted(recorded["lengths"] or ()), recorded["labelled"]
    lengths = [ordered[int((at + 0.5) * share)] for at in range(graph.samples)] if ordered else None
    return {
        "shape": [graph.samples, length], "lengths": lengths,
        "labelled": labelled and max(round(labelled / share), 1),
    }  # fmt: skip


def _other_calls(graph: Graph) -> Sequence[Call | None]:
    """Return each of ``graph.calls`` at another number of samples; None if unknown."""
    recorded: Any = graph.meta.get("shrunk") or {}
    differs = recorded.get("samples") != recorded.get("of")
    return graph.shrunk if graph.shrunk and differs else [None] * len(graph.calls)


def heads(flow: Flow) -> Iterator[Match]:
    """Find the operators from the last residual connection to the loss of tokens."""
    graph = flow.graph
    rows = rows_of(graph, lambda tokens: 0)
    if rows is None:
        return
    others = _other_calls(graph)

    def has_rows(task: int) -> tuple[list[bool], list[bool]]:
        """Return which inputs and outputs of a task have a row per token."""
        call = graph.calls[graph.tasks.call[task]]
        new = rows.call(call, others[graph.tasks.call[task]])
        pairs = ((call.inputs, new.inputs), (call.outputs, new.outputs))
        inputs, outputs = ([a != b for a, b in zip(*pair, strict=True)] for pair in pairs)
        return inputs, outputs

    in_forward = (graph.tasks.phase == StepPhase.FORWARD).tolist()
    losses = flow.calling(_LOSSES, StepPhase.FORWARD).tolist()
    region = {task for task in losses if flow.call(task) is not None and has_rows(task)[0][0]}
    for task in range(max(region, default=-1), -1, -1):
        maker, readers = flow.call(task), set(flow.readers[task])
        if task in region or maker is None or flow.views[task] or not readers & region:
            continue
        if not in_forward[task] or not maker.outputs:
            continue
        inputs, outputs = has_rows(task)
        if not outputs[0]:
            continue
        if maker.name.startswith((*_SCATTERED, ATTENTION)) or sum(inputs) > 1:
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
