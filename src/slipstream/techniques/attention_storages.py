"""Storages of the tensors of a fused attention, derived from the recorded operators.

With them, the fused task has the same data dependences as a recorded one: autocast finds its inputs
and the readers of its results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from slipstream.graph.flow import Flow

_BMM, _CLONE = "aten::bmm", "aten::clone"


class AttentionStorages(NamedTuple):
    """Storages of the inputs and outputs of the fused call, and of its gradient if there is one."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def storages_of(
    flow: Flow,
    products: tuple[int, int],
    forward: Collection[int],
    backward: Sequence[int],
    masks: Sequence[int],
) -> AttentionStorages | None:
    """Return the storages, or None if they are ambiguous.

    Args:
        products: tasks that multiply queries with keys and weights with values.
        forward, backward: tasks that the fused call and its gradient replace.
        masks: the mask's storage, if there is one.
    """
    query, key = _inputs(flow, products[0], forward)
    _, value = _inputs(flow, products[1], forward)
    output = _carried(flow, products[1], forward)
    operands = (query, key, value, *masks, output)
    # If the output reused the storage number of an input, it would look like a view of it.
    if min(operands) < 0 or output in operands[:-1]:
        return None
    if not backward:
        return AttentionStorages(operands, ())
    of_scores, of_weights = (_gradients_of(flow, product) for product in products)
    if of_scores is None or of_weights is None:
        return None
    gradients = [_carried(flow, task, backward) for task in (*of_scores, of_weights[1])]
    incoming = _incoming_gradient(flow, of_weights[1], backward)
    back = (incoming, query, key, value, output, flow.unused_storage, *masks, *gradients)
    return AttentionStorages(operands, back) if min(back) >= 0 else None


def _inputs(flow: Flow, product: int, forward: Collection[int]) -> tuple[int, int]:
    """Return the storages of a matmul's arguments, before it made copies of them."""
    sources = []
    for operand in flow.operands(product)[0][-2:]:
        # A copy within the matmul that makes rows contiguous.
        copies = [
            task
            for task in forward
            if task < product and flow.name(task) == _CLONE and operand in flow.operands(task)[1]
        ]
        sources.append(flow.operands(max(copies))[0][0] if copies else operand)
    left, right = sources
    return left, right


def _carried(flow: Flow, task: int, within: Collection[int]) -> int:
    """Return the storage in which the result of `task` leaves `within`; -1 if ambiguous."""
    seen = set()
    while task not in seen:
        seen.add(task)
        readers = [t for t in flow.readers[task] if t in within]
        if not readers:
            return flow.operands(task)[1][0]
        if len(readers) > 1 or len(readers) != len(flow.readers[task]):
            return -1
        task = readers[0]
    return -1


def _gradients_of(flow: Flow, product: int) -> tuple[int, int] | None:
    """Return the backward products that compute the gradients of a product's left and right side.

    The left gradient is the incoming gradient times the right side; the right gradient is the left
    side times the incoming gradient.
    """
    left, right = flow.operands(product)[0][-2:]
    by_side = {}
    for t in flow.backward[product]:
        if flow.name(t) == _BMM:
            first, second = flow.operands(t)[0]
            by_side["right" if first == left else "left" if second == right else "?"] = t
    return (by_side["left"], by_side["right"]) if set(by_side) == {"left", "right"} else None


def _incoming_gradient(flow: Flow, gradient_of_right: int, backward: Sequence[int]) -> int:
    """Return the storage of the gradient that `backward` reads from outside."""
    task, place = gradient_of_right, 1
    while (maker := flow.makers[task][place]) in backward:
        task, place = maker, 0
    return flow.operands(task)[0][place]
