"""Cut and mix ONNX graphs: layers on another model's tensors, or some layers in float."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from slipstream.runtimes.taps import with_outputs

_SUFFIX = "__reference"


def on_reference(model: Any, names: Sequence[str], fetched: Sequence[str]) -> Any:
    """Return a copy in which readers of a layer read a new input, `NAME__reference`.

    On a reference's tensors, it computes each layer from correct inputs, so that a layer's error
    does not propagate. For a quantized layer, readers of its dequantized values change, so that
    its own scale is part of its error.

    Args:
        names: names of the layers' tensors.
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
    outputs = {output.name for output in model.graph.output}
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
    """Return the inputs of `on_reference`'s graph that exist in `session`."""
    available = {spec.name for spec in session.get_inputs()}
    inputs = {name + _SUFFIX: value for name, value in zip(names, values, strict=True)}
    return {name: value for name, value in inputs.items() if name in available}


def hybrid(candidate: Any, reference: Any, keep: Collection[str], layers: Collection[str]) -> Any:
    """Return a copy of a model in which the layers with the outputs `keep` are the reference's.

    Such a layer takes its nodes and weights from the reference, up to the preceding layers. It
    reads other layers' dequantized values, since quantization may have absorbed an activation node;
    quantized readers still read its codes.

    Args:
        keep: names of tensors of both models.
        layers: names of all tensors that layers compute.
    """
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(candidate)
    graph = copy.graph
    producers = {name: node for node in reference.graph.node for name in node.output}
    weights = {weight.name: weight for weight in reference.graph.initializer}
    computed = {name for node in graph.node for name in node.output}
    graph_inputs, copied = {value.name for value in graph.input}, set()
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
        if name in added or name not in producers:
            continue
        node = added[name] = onnx.NodeProto()
        node.CopyFrom(producers[name])
        for place, source in enumerate(node.input):
            if source in weights:
                node.input[place] = source + _SUFFIX
                copied.add(source)
            elif source in keep or source in graph_inputs:
                continue
            elif source in layers and source in computed:
                node.input[place] = restored.get(source, source)
            else:
                waiting.append(source)
    for source in sorted(copied):
        weight = graph.initializer.add()
        weight.CopyFrom(weights[source])
        weight.name = source + _SUFFIX
    replaced = {name for node in added.values() for name in node.output}
    remaining = [node for node in graph.node if not replaced & set(node.output)]
    ordered = _sorted([*remaining, *{id(node): node for node in added.values()}.values()])
    del graph.node[:]
    graph.node.extend(ordered)
    return copy


def _sorted(nodes: Sequence[Any]) -> list[Any]:
    """Sort nodes topologically."""
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
