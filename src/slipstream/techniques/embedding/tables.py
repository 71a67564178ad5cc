"""Embedding tables of a recorded step, and their tasks."""

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
        bags: number of bags; None for ``nn.Embedding``.
        mode: reduction of the bags.
    """

    bags: int | None = None
    mode: str = "sum"

    @property
    def table(self) -> int:
        """Storage of the weights."""
        return next(iter(self.weights))

    @property
    def weight(self) -> TensorSpec:
        """The weights."""
        return self.weights[self.table]

    @property
    def input(self) -> TensorSpec:
        """Ids that the module receives, with bags of the average size."""
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
    """Return the optimizer's tasks on tensors of `shapes`, in order.

    Returns:
        tasks on single tensors, by shape; tasks on lists that contain such a tensor.
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
    """Return `call` with other tensors instead of tables.

    Args:
        becomes: new shapes of the first, second, ... tensor of a shape in a list; None to remove
            the tensor. A single tensor takes the first.
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
    arguments = _without_removed(tuple(changed(value) for value in call.arguments), gone)
    outputs = tuple(o for o in (changed(o) for o in call.outputs) if isinstance(o, TensorSpec))
    return Call(call.op, arguments, outputs)


def _without_removed(
    arguments: tuple[Any, ...], gone: Mapping[int, Collection[int]]
) -> tuple[Any, ...]:
    """Remove the entries of removed tensors from lists with one number per tensor.

    Args:
        gone: indices of removed tensors, by the former length of the list.
    """
    return tuple(
        tuple(number for place, number in enumerate(value) if place not in gone[len(value)])
        if isinstance(value, (list, tuple))
        and len(value) in gone
        and all(isinstance(number, (int, float)) for number in value)
        else value
        for value in arguments
    )


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
