"""ONNX graphs cut and mixed: each layer alone on another model's tensors, some layers in float."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from slipstream.runtimes.taps import with_outputs

_SUFFIX = "__reference"


def on_reference(model: Any, names: Sequence[str], fetched: Sequence[str]) -> Any:
    """A copy in which whoever reads a layer reads a new input, `NAME__reference`, instead.

    Run on a reference's tensors it gives what each layer makes of right inputs: one layer's error
    reaches no other. Of a quantised layer, readers of its restored values are moved, so that its
    own scale is part of what it is measured by.

    Args:
        names: of the layers' tensors.
        fetched: for each, the tensor to fetch: itself or its codes.
    """
    import onnx

    copy = with_outputs(model, fetched)
    graph = copy.graph
    moved: dict[str, str] = {}
    for name, codes in zip(names, fetched, strict=True):
        if codes == name:
            moved[name] = name + _SUFFIX
        for node in graph.node:
            if node.op_type == "DequantizeLinear" and node.input[0] == codes:
                moved[node.output[0]] = name + _SUFFIX
    outputs = {one.name for one in model.graph.output}
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name in moved:
                node.input[place] = moved[name]
    graph.input.extend(
        onnx.helper.make_tensor_value_info(name + _SUFFIX, onnx.TensorProto.FLOAT, None)
        for name in names
        if name not in outputs
    )
    return copy


def reference_inputs(names: Sequence[str], values: Sequence[Any], session: Any) -> dict[str, Any]:
    """What `on_reference`'s graph is fed, as far as it still has the input."""
    known = {one.name for one in session.get_inputs()}
    fed = {name + _SUFFIX: value for name, value in zip(names, values, strict=True)}
    return {name: value for name, value in fed.items() if name in known}


def hybrid(candidate: Any, reference: Any, keep: Collection[str], layers: Collection[str]) -> Any:
    """A copy of a model in which the layers that give these tensors are the reference's.

    A layer kept takes its nodes and weights from the reference, up to the layers before it. Of
    those that are not kept it reads what their codes stand for: codes may do an activation's work,
    whose node is gone. Whoever reads it and is quantised still reads its codes.

    Args:
        keep: names of tensors that both models have.
        layers: names of all tensors that layers give.
    """
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(candidate)
    graph = copy.graph
    makers = {name: node for node in reference.graph.node for name in node.output}
    weights = {one.name: one for one in reference.graph.initializer}
    mine = {name for node in graph.node for name in node.output}
    have, taken = {one.name for one in graph.input}, set()
    codes = {
        node.output[0]: node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"
    }
    restored = {
        codes[node.input[0]]: node.output[0]
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in codes
    }
    added: dict[str, Any] = {}
    waiting = list(keep)
    while waiting:
        name = waiting.pop()
        if name in added or name not in makers:
            continue
        node = added[name] = onnx.NodeProto()
        node.CopyFrom(makers[name])
        for place, source in enumerate(node.input):
            if source in weights:
                node.input[place] = source + _SUFFIX
                taken.add(source)
            elif source in keep or source in have:
                continue
            elif source in layers and source in mine:
                node.input[place] = restored.get(source, source)
            else:
                waiting.append(source)
    for source in sorted(taken):
        weight = graph.initializer.add()
        weight.CopyFrom(weights[source])
        weight.name = source + _SUFFIX
    replaced = {name for node in added.values() for name in node.output}
    rest = [node for node in graph.node if not replaced & set(node.output)]
    ordered = _sorted([*rest, *{id(node): node for node in added.values()}.values()])
    del graph.node[:]
    graph.node.extend(ordered)
    return copy


def _sorted(nodes: Sequence[Any]) -> list[Any]:
    """In an order in which nobody reads what is not made yet."""
    outputs = {name for node in nodes for name in node.output}
    done: set[str] = set()
    waiting = list(nodes)
    ordered: list[Any] = []
    while waiting:
        ready = [n for n in waiting if all(i not in outputs or i in done for i in n.input)]
        if not ready:
            return [*ordered, *waiting]
        for node in ready:
            done.update(node.output)
        ordered += ready
        waiting = [n for n in waiting if n not in ready]
    return ordered
