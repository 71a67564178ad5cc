"""A traced graph of torch's as operations with values, as `durations.movement` reads a step.

A node of FX that computes is an operation; nodes that only look at a tensor in another way hand its
value on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from slipstream.durations.movement import Operation
from slipstream.durations.traffic import traffic
from slipstream.graph import Call, TensorSpec


def spec_of(value: Any) -> TensorSpec | None:
    """The spec of a (fake) tensor; None of anything else, or of a size only known when it runs."""
    if not isinstance(value, torch.Tensor):
        return None
    shape, strides = tuple(value.shape), tuple(value.stride())
    if not all(type(extent) is int for extent in (*shape, *strides)):
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorSpec(dtype, shape, strides, value.device.type)


def _argument(value: Any) -> Any:
    if isinstance(value, Node):
        made = value.meta.get("val")
        return spec_of(made) if isinstance(made, torch.Tensor) else None
    if isinstance(value, (list, tuple)):
        return tuple(_argument(item) for item in value)
    return value if isinstance(value, (int, float, bool, str, type(None))) else None


def call_of(node: Node) -> Call | None:
    """What a node calls, its arguments in the schema's order; None where it is no operator."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return None
    arguments = []
    for number, argument in enumerate(schema.arguments):
        if argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        elif number < len(node.args) and not argument.kwarg_only:
            value = node.args[number]
        else:
            value = argument.default_value if argument.has_default_value() else None
        arguments.append(_argument(value))
    made = node.meta.get("val")
    several = made if isinstance(made, (list, tuple)) else (made,)
    outputs = tuple(spec for one in several if (spec := spec_of(one)) is not None)
    return Call(str(schema), tuple(arguments), outputs)


def _tensor_inputs(node: Node) -> Iterator[Node]:
    """Nodes in the order of the tensors of `call_of`."""
    target: Any = node.target
    for number, argument in enumerate(target._schema.arguments):
        value = node.kwargs.get(argument.name)
        if value is None and number < len(node.args) and not argument.kwarg_only:
            value = node.args[number]
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Node) and spec_of(item.meta.get("val")) is not None:
                yield item


def operations_of(
    module: GraphModule, part: int = 0, values: dict[str, int] | None = None
) -> tuple[list[Operation], frozenset[int], list[Node]]:
    """Operations of a traced graph, values that leave it, and the node of each operation.

    Args:
        part: of the step, see `Operation`.
        values: the values that placeholders have, by name; new ones where there is none. What
            this graph returns is added under the names of the nodes.
    """
    known = values if values is not None else {}
    following = max(known.values(), default=-1) + 1
    of: dict[Node, tuple[int, ...]] = {}
    operations: list[Operation] = []
    nodes: list[Node] = []
    leaving: set[int] = set()
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if node.name not in known:
                known[node.name], following = following, following + 1
            of[node] = (known[node.name],)
        elif node.op == "output":
            for one in node.all_input_nodes:
                leaving.update(of.get(one, ()))
                if len(of.get(one, ())) == 1:
                    known[one.name] = of[one][0]
        elif getattr(node.target, "__name__", "") == "getitem":
            parent, index = node.args
            parts = of.get(parent, ())
            of[node] = (parts[index],) if index < len(parts) else ()
        else:
            call = call_of(node)
            if call is None:
                of[node] = ()
                continue
            moved = traffic(call)
            inputs = [of[one][0] for one in _tensor_inputs(node) if of.get(one)]
            reads = tuple((v, n) for v, n in zip(inputs, moved.reads, strict=False) if n)
            if call.outputs and not any(moved.writes) and inputs:
                of[node] = (inputs[0],)
                continue
            made = tuple(range(following, following + len(call.outputs)))
            following += len(made)
            of[node] = made
            operations.append(
                Operation(
                    len(operations), call, reads,
                    tuple(zip(made, moved.writes, strict=True)), part,
                )
            )  # fmt: skip
            nodes.append(node)
    return operations, frozenset(leaving), nodes
