"""A traced graph of torch's as operations with values, as `durations.movement` reads a step.

A node of FX that computes is an operation; nodes that only look at a tensor in another way hand its
value on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from slipstream.durations.movement import Operation
from slipstream.durations.traffic import is_view, traffic
from slipstream.graph import Call, TensorSpec
from slipstream.graph.call import SCALAR_TYPE
from slipstream.techniques.fusion.lowering import Source


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
        fake = value.meta.get("val")
        return spec_of(fake) if isinstance(fake, torch.Tensor) else None
    if isinstance(value, (list, tuple)):
        return tuple(_argument(item) for item in value)
    if isinstance(value, torch.dtype):
        return SCALAR_TYPE.get(str(value).removeprefix("torch."))
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
    returned = node.meta.get("val")
    several = returned if isinstance(returned, (list, tuple)) else (returned,)
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


@dataclass(frozen=True)
class Traced:
    """A traced graph, operation by operation.

    Attributes:
        operations: as `durations.movement` takes them.
        nodes: of each operation.
        inputs, sources: of each operation, for each tensor of its call: its value, and where it
            lies: in what was made, whatever views are between.
        outputs: of each operation, a value for each tensor it returns.
        leaving: values that the graph returns.
        value: of each node that stands for one tensor.
    """

    operations: tuple[Operation, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[Source, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    leaving: frozenset[int]
    value: Mapping[Node, int]


def trace_of(module: GraphModule, part: int = 0, values: dict[str, int] | None = None) -> Traced:
    """The operations of a traced graph.

    Args:
        part: of the step, see `Operation`.
        values: the values that placeholders have, by name; new ones where there is none. What
            this graph returns is added under the names of the nodes.
    """
    known = values if values is not None else {}
    following = max(known.values(), default=-1) + 1
    of: dict[Node, tuple[int, ...]] = {}
    rows: list[tuple[Operation, Node, tuple[int, ...], tuple[Source, ...], tuple[int, ...]]] = []
    first: dict[int, Node] = {}
    leaving: set[int] = set()
    for node in module.graph.nodes:
        for one in node.all_input_nodes:
            if len(of.get(one, ())) == 1:
                first.setdefault(of[one][0], one)
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
            given = tuple(_tensor_inputs(node)) if call is not None else ()
            inputs = tuple(of[one][0] for one in given if of.get(one))
            if call is None or len(inputs) != len(given):
                returned = node.meta.get("val")
                count = len(returned) if isinstance(returned, (list, tuple)) else 1
                of[node] = tuple(range(following, following + count))
                following += count
                continue
            moved = traffic(call)
            reads = tuple((v, n) for v, n in zip(inputs, moved.reads, strict=True) if n)
            if call.outputs and is_view(call) and inputs:
                seen = node.meta.get("val")
                of[node] = (inputs[0],) * (len(seen) if isinstance(seen, (list, tuple)) else 1)
                continue
            sources = tuple(_source(one, first[v]) for one, v in zip(given, inputs, strict=True))
            # By place in what it returns, which may hold None.
            returned = node.meta.get("val")
            several = returned if isinstance(returned, (list, tuple)) else (returned,)
            present = [spec_of(one) is not None for one in several]
            of[node] = tuple(range(following, following + len(present)))
            following += len(present)
            outputs = tuple(v for v, there in zip(of[node], present, strict=True) if there)
            writes = tuple(zip(outputs, moved.writes, strict=True))
            one = Operation(len(rows), call, reads, writes, part)
            rows.append((one, node, inputs, sources, outputs))
    columns = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    operations, nodes, inputs_, sources_, outputs_ = (tuple(column) for column in columns)
    values_of = {node: parts[0] for node, parts in of.items() if len(parts) == 1}
    return Traced(operations, nodes, inputs_, sources_, outputs_, frozenset(leaving), values_of)


def _source(node: Node, maker: Node) -> Source:
    """Where the tensor of `node` lies in that of `maker`, of which it is a view."""
    seen, whole = node.meta["val"], maker.meta["val"]
    spec, view = spec_of(whole), spec_of(seen)
    assert view is not None
    if spec is None or spec.dtype != view.dtype:
        return Source(node, view)
    return Source(maker, spec, seen.storage_offset() - whole.storage_offset())


def stack_parts(module: GraphModule) -> int:
    """Write gradients of a tensor's parts once, where they are added up in tensors of zeros.

    A packed projection is taken apart by selecting its parts. Traced, the gradient of each is a
    whole tensor, of zeros but for the part, and these are added; eager mode stacks the parts.

    Returns:
        How many sums of parts became stacks.
    """
    aten = torch.ops.aten
    stacks = 0
    for node in list(module.graph.nodes):
        inner = [user.target is aten.add.Tensor for user in node.users]
        if node.target is not aten.add.Tensor or (len(inner) == 1 and inner[0]):
            continue
        parts = _summands(node)
        kinds = {(tuple(one.args[1]), one.args[2]) for one in parts}
        if len(kinds) != 1 or any(len(one.users) != 1 for one in parts):
            continue
        sizes, dim = kinds.pop()
        by_index = {one.args[3] % sizes[dim]: one.args[0] for one in parts}
        if len(parts) != sizes[dim] or len(by_index) != sizes[dim]:
            continue
        with module.graph.inserting_before(node):
            ordered = [by_index[n] for n in range(sizes[dim])]
            stacked = module.graph.call_function(aten.stack.default, (ordered, dim))
        stacked.meta = dict(node.meta)
        node.replace_all_uses_with(stacked)
        stacks += 1
    if stacks:
        module.graph.eliminate_dead_code()
        module.recompile()
    return stacks


def _summands(node: Node) -> list[Any]:
    """The gradients of parts that are added up to `node`, each a node; none where it is other."""
    if node.target is torch.ops.aten.select_backward.default:
        return [node]
    plain = node.target is torch.ops.aten.add.Tensor and not node.kwargs
    both = [one for one in node.args if isinstance(one, Node)]
    if not plain or len(both) != 2:
        return []
    below = [_summands(one) for one in both]
    return [*below[0], *below[1]] if all(below) else []
