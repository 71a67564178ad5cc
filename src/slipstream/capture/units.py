"""Find the nodes of a step's tree that become tasks, and the profiler events of each.

A *unit* is an outermost operator that has a kernel. Composite operators (``linear``, ``matmul``)
only call others: their overhead, like Python's and autograd's, is the gap between units. Getting a
batch from a ``DataLoader`` is also a unit, in addition to the operators inside; see `overhead.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.modules import PREFIX
from slipstream.capture.trace import AUTOGRAD, Node
from slipstream.graph import CLOSURE_RANGE, StepPhase

LOADING = "enumerate(DataLoader)#"
"""Prefix of torch's annotations of a ``DataLoader``'s ``__next__``."""


@dataclass(frozen=True)
class Units:
    """The u units of a step; event indices count the trace's nodes without module annotations.

    Attributes:
        nodes: int64 [u], index of each unit's node in the trace.
        first, last: int64 [u], events of the unit and of its last descendant.
        phase: uint8 [u].
        module: Innermost module of each unit; backward units have that of their forward.
        scope: Names of the enclosing operators, joined by ``/``.
        sequence: int64 [u], autograd's number; -1 for none.
        loading: int64 [u], the loading unit that a unit belongs to: itself for a loading unit, -1
            for none.
        events: Names of all e events, with which the profiler's steps are aligned.
        parents: int64 [e], index of the enclosing event, -1 at the top.
    """

    nodes: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    phase: NDArray[np.uint8]
    module: tuple[str, ...]
    scope: tuple[str, ...]
    sequence: NDArray[np.int64]
    loading: NDArray[np.int64]
    events: tuple[str, ...]
    parents: NDArray[np.int64]

    @cached_property
    def in_closure(self) -> NDArray[np.bool_]:
        """Whether each event is within a closure of ``Optimizer.step``, bool [e]."""
        inside: list[bool] = []
        for name, parent in zip(self.events, self.parents.tolist(), strict=True):
            inside.append(name == CLOSURE_RANGE or (parent >= 0 and inside[parent]))
        return np.array(inside, np.bool_)


@dataclass
class _Place:
    """Properties that a node inherits from its parents."""

    phase: StepPhase
    module: str
    scope: str
    sequence: int
    unit: int
    loading: int = -1


def find_units(nodes: Sequence[Node]) -> Units:
    """Return the units of a trace in program order."""
    places: list[_Place] = []
    rows: list[tuple[int, int, StepPhase, str, str, int]] = []
    last: list[int] = []
    loading: list[int] = []
    events: list[str] = []
    parents: list[int] = []
    # By node: its event, or the enclosing one for a module's annotation.
    event_of: list[int] = []
    by_sequence: dict[int, str] = {}
    # By storage: the module whose backward pass last wrote it.
    gradient_of: dict[int, str] = {}
    engine = _engine_sequences(nodes)
    backward_seen = False
    for i, node in enumerate(nodes):
        around = places[node.parent] if node.parent >= 0 else None
        if node.parent >= 0 and nodes[node.parent].name == CLOSURE_RANGE:
            # Like the top of a step: the enclosing update starts after it.
            around = None
        if node.name == CLOSURE_RANGE or (around is None and node.name.startswith(PREFIX)):
            # Another forward pass: a step may have several (gradient accumulation).
            backward_seen = False
        place = _place(node, around, backward_seen, engine.get(i, -1))
        backward_seen = backward_seen or place.phase is StepPhase.BACKWARD
        places.append(place)
        enclosing = event_of[node.parent] if node.parent >= 0 else -1
        if node.name.startswith(PREFIX):
            event_of.append(enclosing)
            continue
        event = len(events)
        events.append(node.name)
        parents.append(enclosing)
        event_of.append(event)
        if place.loading >= 0:
            last[place.loading] = event
        elif node.name.startswith(LOADING):
            place.loading = len(rows)
            rows.append((i, event, place.phase, "", node.name, -1))
            last.append(event)
            loading.append(place.loading)
            continue
        if place.unit >= 0:
            last[place.unit] = event
            continue
        if place.phase is StepPhase.FORWARD and node.sequence >= 0:
            # The innermost operator with a number created the autograd node.
            by_sequence[node.sequence] = place.module
        if node.call is None or _is_composite(node.call.op):
            continue
        place.unit = len(rows)
        sequence = node.sequence if place.phase is StepPhase.FORWARD else place.sequence
        module = place.module
        if place.phase is StepPhase.BACKWARD:
            inputs = node.storages[: len(node.call.inputs)]
            if not module:
                # An operator without a number accumulates a parameter's gradient, and belongs to
                # the module that computed it.
                maker = next((gradient_of[s] for s in inputs if s in gradient_of), "")
                module = by_sequence.get(sequence, "") if sequence >= 0 else maker
            for storage in set(node.storages[len(inputs) :]).difference(inputs):
                gradient_of[storage] = module
        rows.append((i, event, place.phase, module, around.scope if around else "", sequence))
        last.append(event)
        loading.append(place.loading)
    return Units(
        nodes=np.array([row[0] for row in rows], np.int64),
        first=np.array([row[1] for row in rows], np.int64),
        last=np.array(last, np.int64),
        phase=np.array([row[2] for row in rows], np.uint8),
        module=tuple(row[3] for row in rows),
        scope=tuple(row[4] for row in rows),
        sequence=np.array([row[5] for row in rows], np.int64),
        loading=np.array(loading, np.int64),
        events=tuple(events),
        parents=np.array(parents, np.int64),
    )


def _engine_sequences(nodes: Sequence[Node]) -> dict[int, int]:
    """Return the number of the backward operator that each node of autograd's engine evaluates.

    The engine also reduces and accumulates gradients after the operator.
    """
    return {
        node.parent: node.sequence
        for node in nodes
        if node.parent >= 0
        and node.call is None
        and node.sequence >= 0
        and nodes[node.parent].name.startswith(AUTOGRAD)
    }


def _place(node: Node, around: _Place | None, backward_seen: bool, engine_sequence: int) -> _Place:
    if around is None:
        # The optimizer and user code between steps follow the backward pass.
        phase = StepPhase.OTHER if backward_seen else StepPhase.FORWARD
        around = _Place(phase, "", "", -1, -1)
    phase, module, scope, sequence = around.phase, around.module, around.scope, around.sequence
    if node.name.startswith(PREFIX):
        name = node.name[len(PREFIX) :]
        return _Place(phase, name, scope, sequence, around.unit, around.loading)
    if node.name.startswith(AUTOGRAD):
        phase, sequence = StepPhase.BACKWARD, engine_sequence
    elif node.name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
        phase = StepPhase.OPTIMIZER
    elif node.name.startswith(LOADING):
        phase = StepPhase.OTHER
    if phase is StepPhase.BACKWARD and node.call is None and node.sequence >= 0:
        sequence = node.sequence
    inside = f"{scope}/{node.name}" if scope else node.name
    return _Place(phase, module, inside, sequence, around.unit, around.loading)


@cache
def _is_composite(schema: str) -> bool:
    """Whether the operator only calls other operators, which autograd sees instead of it."""
    import torch

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = schema.partition("(")[0]
    try:
        # Some have both (silu_backward); the device's kernel then takes precedence.
        return bool(has_kernel(name, "CompositeImplicitAutograd")) and not has_kernel(name, "CPU")
    except RuntimeError:
        # Not registered on this machine (a foreign trace): time it as a whole.
        return False
