"""A traced graph as operations with values, the form in which a recorded step is read, too.

Every node that computes is an operation; views pass on the value of their base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from slipstream.graph import Call, TensorSpec
from slipstream.graph.call import SCALAR_TYPE
from slipstream.graph.operations import Operation
from slipstream.graph.traffic import is_view, traffic


@dataclass(frozen=True)
class Source:
    """The tensor in memory that an operand is, or is a view of.

    Attributes:
        value: an identifier of that tensor: an FX node, or the number of a value.
        spec: spec of that tensor.
        start: offset of the operand in the tensor, in elements; None if it is unnamed, and the
            tensor is the operand itself.
    """

    value: Any
    spec: TensorSpec
    start: int | None = None


def spec_of(value: Any) -> TensorSpec | None:
    """Return the spec of a (fake) tensor; None for other values and for symbolic sizes."""
    if not isinstance(value, torch.Tensor):
        return None
    shape, strides = tuple(value.shape), tuple(value.stride())
    if not all(type(extent) is int for extent in (*shape, *strides)):
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorSpec(dtype, shape, strides, value.device.type)


def _argument(value: Any) -> Any:
    if isinstance(value, Node):
        fake = value.meta.get("val")
        return spec_of(fake) if isinstance(fake, torch.Tensor) else None
    if isinstance(value, (list, tuple)):
        return tuple(_argument(item) for item in value)
    if isinstance(value, torch.dtype):
        return SCALAR_TYPE.get(str(value).removeprefix("torch."))
    return value if isinstance(value, (int, float, bool, str, type(None))) else None


def arguments_of(node: Node) -> list[Any]:
    """Return the arguments of a node in schema order, with defaults; without a schema, its args."""
    schema: Any = getattr(node.target, "_schema", None)
    arguments = list(node.args)
    for number, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name in node.kwargs:
            arguments.append(node.kwargs[argument.name])
        elif number >= len(node.args):
            arguments.append(argument.default_value if argument.has_default_value() else None)
    return arguments


def call_of(node: Node) -> Call | None:
    """Return the call of a node, arguments in schema order; None if it calls no operator."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return None
    arguments = map(_argument, arguments_of(node))
    returned = node.meta.get("val")
    results = returned if isinstance(returned, (list, tuple)) else (returned,)
    outputs = tuple(spec for result in results if (spec := spec_of(result)) is not None)
    return Call(str(schema), tuple(arguments), outputs)


def _tensor_inputs(node: Node) -> Iterator[Node]:
    """Yield the nodes of a call's tensors, in the order of ``Call.inputs``."""
    target: Any = node.target
    for number, argument in enumerate(target._schema.arguments):
        value = node.kwargs.get(argument.name)
        if value is None and number < len(node.args) and not argument.kwarg_only:
            value = node.args[number]
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Node) and spec_of(item.meta.get("val")) is not None:
                yield item


@dataclass(frozen=True)
class TracedGraph:
    """The operations of a traced graph.

    Attributes:
        operations: in the order of the graph.
        nodes: per operation, its node.
        inputs, sources: per operation and tensor of its call, the value and its source, which
            looks through views.
        outputs: per operation, a value for each tensor that it returns.
        leaving: values that the graph returns.
        value: the value of each node that is a single tensor.
    """

    operations: tuple[Operation, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[Source, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    leaving: frozenset[int]
    value: Mapping[Node, int]


def trace_of(
    module: GraphModule, part: int = 0, values: dict[str, int] | None = None
) -> TracedGraph:
    """Read a traced graph as operations.

    Args:
        part: phase of the step, see `Operation`.
        values: values of placeholders by name; others get new ones. The values that this graph
            returns are added under the names of their nodes.
    """
    named = values if values is not None else {}
    following = max(named.values(), default=-1) + 1
    of: dict[Node, tuple[int, ...]] = {}
    rows: list[tuple[Operation, Node, tuple[int, ...], tuple[Source, ...], tuple[int, ...]]] = []
    first: dict[int, Node] = {}
    leaving: set[int] = set()
    for node in module.graph.nodes:
        for operand in node.all_input_nodes:
            if len(of.get(operand, ())) == 1:
                first.setdefault(of[operand][0], operand)
        if node.op in ("placeholder", "get_attr"):
            if node.name not in named:
                named[node.name], following = following, following + 1
            of[node] = (named[node.name],)
        elif node.op == "output":
            for operand in node.all_input_nodes:
                leaving.update(of.get(operand, ()))
                if len(of.get(operand, ())) == 1:
                    named[operand.name] = of[operand][0]
        elif getattr(node.target, "__name__", "") == "getitem":
            parent, index = node.args
            parts = of.get(parent, ())
            of[node] = (parts[index],) if index < len(parts) else ()
        else:
            call = call_of(node)
            operands = tuple(_tensor_inputs(node)) if call is not None else ()
            inputs = tuple(of[operand][0] for operand in operands if of.get(operand))
            if call is None or len(inputs) != len(operands):
                returned = node.meta.get("val")
                count = len(returned) if isinstance(returned, (list, tuple)) else 1
                of[node] = tuple(range(following, following + count))
                following += count
                continue
            moved = traffic(call)
            reads = tuple((v, n) for v, n in zip(inputs, moved.reads, strict=True) if n)
            if call.outputs and is_view(call) and inputs:
                views = node.meta.get("val")
                of[node] = (inputs[0],) * (len(views) if isinstance(views, (list, tuple)) else 1)
                continue
            sources = tuple(_source(n, first[v]) for n, v in zip(operands, inputs, strict=True))
            # By index in the returned tuple, which may contain None.
            returned = node.meta.get("val")
            results = returned if isinstance(returned, (list, tuple)) else (returned,)
            present = [spec_of(result) is not None for result in results]
            of[node] = tuple(range(following, following + len(present)))
            following += len(present)
            outputs = tuple(v for v, exists in zip(of[node], present, strict=True) if exists)
            writes = tuple(zip(outputs, moved.writes, strict=True))
            operation = Operation(len(rows), call, reads, writes, part)
            rows.append((operation, node, inputs, sources, outputs))
    columns = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    operations, nodes, inputs_, sources_, outputs_ = (tuple(column) for column in columns)
    values_of = {node: parts[0] for node, parts in of.items() if len(parts) == 1}
    return TracedGraph(
        operations, nodes, inputs_, sources_, outputs_, frozenset(leaving), values_of
    )


def _source(node: Node, maker: Node) -> Source:
    """Return the source of `node`, a view of the tensor of `maker`."""
    viewed, base = node.meta["val"], maker.meta["val"]
    spec, view = spec_of(base), spec_of(viewed)
    assert view is not None
    if spec is None or spec.dtype != view.dtype:
        return Source(node, view)
    return Source(maker, spec, viewed.storage_offset() - base.storage_offset())
