"""Which storages the tensors of a fused attention lie in, told from the attention written out.

With them a task that is put in place of many can be followed like a recorded one: autocast sees
what it reads and what reads its results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from slipstream.graph.flow import Flow

_BMM, _CLONE = "aten::bmm", "aten::clone"


class AttentionStorages(NamedTuple):
    """Storages of the fused call's inputs, then outputs; of its gradient's; empty without one."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def storages_of(
    flow: Flow,
    products: tuple[int, int],
    forward: Collection[int],
    backward: Sequence[int],
    masks: Sequence[int],
) -> AttentionStorages | None:
    """The storages, or None where they cannot be told for certain.

    Args:
        products: the tasks that multiply queries with keys and weights with values.
        forward, backward: the tasks that make way for the fused call and its gradient.
        masks: the mask's storage, if there is one.
    """
    query, key = _inputs(flow, products[0], forward)
    _, value = _inputs(flow, products[1], forward)
    output = _carried(flow, products[1], forward)
    there = (query, key, value, *masks, output)
    # A number that is used again for the output would make it look like a view of an input.
    if min(there) < 0 or output in there[:-1]:
        return None
    if not backward:
        return AttentionStorages(there, ())
    of_scores, of_weights = (_gradients_of(flow, product) for product in products)
    if of_scores is None or of_weights is None:
        return None
    grads = [_carried(flow, one, backward) for one in (*of_scores, of_weights[1])]
    arrives = _arrives(flow, of_weights[1], backward)
    back = (arrives, query, key, value, output, flow.unused_storage, *masks, *grads)
    return AttentionStorages(there, back) if min(back) >= 0 else None


def _inputs(flow: Flow, product: int, forward: Collection[int]) -> tuple[int, int]:
    """Storages of what a matmul was called with, before it made its operands fit."""
    sources = []
    for operand in flow.operands(product)[0][-2:]:
        # A copy that only puts rows side by side, within the matmul.
        copies = [
            task
            for task in forward
            if task < product and flow.name(task) == _CLONE and operand in flow.operands(task)[1]
        ]
        sources.append(flow.operands(max(copies))[0][0] if copies else operand)
    left, right = sources
    return left, right


def _carried(flow: Flow, task: int, within: Collection[int]) -> int:
    """The storage in which the result of `task` leaves the tasks `within`; -1 where unclear."""
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
    """The products of the backward pass that give the gradients of a product's two sides.

    The left side's is the arriving gradient times the right side, the right side's the left side
    times the arriving gradient.
    """
    left, right = flow.operands(product)[0][-2:]
    by_side = {}
    for t in flow.backward[product]:
        if flow.name(t) == _BMM:
            one, other = flow.operands(t)[0]
            by_side["right" if one == left else "left" if other == right else "?"] = t
    return (by_side["left"], by_side["right"]) if set(by_side) == {"left", "right"} else None


def _arrives(flow: Flow, gradient_of_right: int, backward: Sequence[int]) -> int:
    """The storage of the gradient that comes to the tasks `backward` from outside of them."""
    task, place = gradient_of_right, 1
    while (maker := flow.makers[task][place]) in backward:
        task, place = maker, 0
    return flow.operands(task)[0][place]
