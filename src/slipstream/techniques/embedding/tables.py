"""Embedding tables in a recorded step: which there are, and the tasks that serve them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.graph import Call, Graph, StepPhase, TensorSpec
from slipstream.graph.flow import Flow, Match

_EMBEDDING = "aten::embedding"
_BAGS = ("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
_BACKWARD = (
    "aten::embedding_dense_backward", "aten::_embedding_bag_backward",
    "aten::_embedding_bag_dense_backward",
)  # fmt: skip
_MODES = ("sum", "mean", "max")
_MODE_AT = 4


@dataclass(frozen=True, eq=False)
class Lookup(Match):
    """One look-up of a table.

    Attributes:
        bags: how many bags, or None for ``nn.Embedding``.
        mode: of the bags.
    """

    bags: int | None = None
    mode: str = "sum"

    @property
    def table(self) -> int:
        """The weights' storage."""
        return next(iter(self.weights))

    @property
    def weight(self) -> TensorSpec:
        """The table."""
        return self.weights[self.table]

    @property
    def input(self) -> TensorSpec:
        """Ids as a module is given them; bags of the average size."""
        if self.bags is None:
            shape = self.x.shape
        else:
            bags = max(self.bags, 1)
            shape = (bags, max(1, round(self.x.numel / bags)))
        return TensorSpec(self.x.dtype, shape, _contiguous(shape))


def lookups(flow: Flow) -> Iterator[Lookup]:
    """Find every look-up of a parameter."""
    for task in flow.calling((_EMBEDDING, *_BAGS), StepPhase.OTHER, StepPhase.FORWARD).tolist():
        call, (storages, _) = flow.call(task), flow.operands(task)
        if call is None or (flow.parameters and storages[0] not in flow.parameters):
            continue
        weight, ids, rows = call.inputs[0], call.inputs[1], call.outputs[0]
        bags = None if call.name == _EMBEDDING else rows.shape[0]
        mode = "sum" if bags is None else _MODES[int(call.arguments[_MODE_AT])]
        module = flow.graph.task(task).module.partition(".")[2]
        backward = [back for back in flow.backward[task] if flow.name(back) in _BACKWARD][:1]
        yield Lookup(
            "embedding", module, (task,), tuple(backward), ids, rows, {storages[0]: weight},
            bags=bags, mode=mode,
        )  # fmt: skip


def updates(
    graph: Graph, shapes: Collection[tuple[int, ...]]
) -> tuple[dict[tuple[int, ...], list[int]], list[int]]:
    """The optimizer's tasks on tensors of some shapes, in order.

    Returns:
        by shape the tasks on single tensors; the tasks on lists with such a tensor among them.
    """
    by_shape: dict[tuple[int, ...], list[int]] = {shape: [] for shape in shapes}
    on_lists = []
    for task in (graph.tasks.phase == StepPhase.OPTIMIZER).nonzero()[0].tolist():
        call = graph.task(task).call
        updated = set() if call is None else {spec.shape for spec in call.inputs} & set(shapes)
        if call is not None and updated and is_list(call):
            on_lists.append(task)
            continue
        for shape in updated:
            by_shape[shape].append(task)
    return by_shape, on_lists


def is_list(call: Call) -> bool:
    """Whether an operator takes lists of tensors: ``foreach`` and fused updates."""
    return any(isinstance(value, (list, tuple)) and value for value in call.arguments)


def with_arrays(
    call: Call, becomes: Mapping[tuple[int, ...], Sequence[tuple[int, ...] | None]]
) -> Call:
    """`call` with other tensors in the place of tables.

    Args:
        becomes: by shape, what the first, second, ... tensor of it in a list becomes; None for
            one that is left out. A single tensor becomes the first.
    """

    def like(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
        return TensorSpec(spec.dtype, shape, _contiguous(shape), spec.device)

    def changed(value: object) -> object:
        if isinstance(value, TensorSpec):
            first = becomes[value.shape][0] if value.shape in becomes else None
            return value if first is None else like(value, first)
        if not isinstance(value, (list, tuple)):
            return value
        changed_items: list[object] = []
        met = dict.fromkeys(becomes, 0)
        for place, item in enumerate(value):
            if not isinstance(item, TensorSpec) or item.shape not in becomes:
                changed_items.append(changed(item))
                continue
            number, of = met[item.shape], becomes[item.shape]
            met[item.shape] += 1
            new = of[number] if number < len(of) else item.shape
            if new is not None:
                changed_items.append(like(item, new))
            else:
                gone.setdefault(len(value), set()).add(place)
        return tuple(changed_items)

    gone: dict[int, set[int]] = {}
    arguments = _numbers_alike(tuple(changed(value) for value in call.arguments), gone)
    outputs = tuple(o for o in (changed(o) for o in call.outputs) if isinstance(o, TensorSpec))
    return Call(call.op, arguments, outputs)


def _numbers_alike(
    arguments: tuple[Any, ...], gone: Mapping[int, Collection[int]]
) -> tuple[Any, ...]:
    """Arguments in which lists of numbers, one for each tensor, lose what those lists lost.

    Args:
        gone: by the length that lists had, the places that tensors left.
    """
    return tuple(
        tuple(one for place, one in enumerate(value) if place not in gone[len(value)])
        if isinstance(value, (list, tuple))
        and len(value) in gone
        and all(isinstance(one, (int, float)) for one in value)
        else value
        for value in arguments
    )


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
