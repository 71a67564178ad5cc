"""Cut and mix TensorFlow Lite networks: layers on given tensors, or some layers in float."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from slipstream.ship.firmware.network import Network, Operator, Tensor

_SUFFIX, _FLOAT = "__reference", "__float"


def on_reference(network: Network, layers: Sequence[int]) -> Network:
    """Return a copy in which readers of a layer read a new input; its outputs are the layers.

    On a reference's tensors, it computes each layer from correct inputs, so that a layer's error
    does not propagate. The new inputs follow the network's own, in the order of `layers`.
    """
    count = len(network.tensors)
    moved = {layer: count + n for n, layer in enumerate(layers)}
    inputs = [replace(network.tensors[n], name=network.tensors[n].name + _SUFFIX) for n in layers]
    operators = [
        replace(op, inputs=tuple(moved.get(n, n) for n in op.inputs)) for op in network.operators
    ]
    return Network(
        network.name, (*network.tensors, *inputs), tuple(operators),
        (*network.inputs, *moved.values()), tuple(layers),
    )  # fmt: skip


def hybrid(candidate: Network, reference: Network, keep: Mapping[int, int]) -> Network:
    """Return a copy in which some layers are the reference's, with its weights, in float.

    Such a layer reads dequantized codes, or the floats of another such layer; quantized layers read
    its codes. `keep` maps output tensors of the candidate's layers to those of the reference's.
    """
    tensors = list(candidate.tensors)
    operators: list[Operator] = []
    floats: dict[int, int] = {}
    producers = {n: operator for operator in reference.operators for n in operator.outputs}

    def added(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    def added_float(tensor: Tensor) -> int:
        name = tensor.name + _FLOAT
        return added(replace(tensor, name=name, dtype="float32", quantization=None))

    def float_of(codes: int) -> int:
        tensor = candidate.tensors[codes]
        if tensor.dtype == "float32":
            return codes
        if codes not in floats:
            floats[codes] = added_float(tensor)
            operators.append(Operator("dequantize", (codes,), (floats[codes],)))
        return floats[codes]

    for operator in candidate.operators:
        codes = operator.outputs[0] if operator.outputs else -1
        if codes not in keep:
            operators.append(operator)
            continue
        source = producers[keep[codes]]
        computed = iter(
            [n for n in operator.inputs if n >= 0 and candidate.tensors[n].data is None]
        )
        inputs = []
        for n in source.inputs:
            constant = n >= 0 and reference.tensors[n].data is not None
            inputs.append(added(reference.tensors[n]) if constant else
                          n if n < 0 else float_of(next(computed)))  # fmt: skip
        tensor = candidate.tensors[codes]
        if tensor.dtype == "float32":
            operators.append(replace(source, inputs=tuple(inputs), outputs=(codes,)))
            continue
        floats[codes] = added_float(tensor)
        operators.append(replace(source, inputs=tuple(inputs), outputs=(floats[codes],)))
        operators.append(Operator("quantize", (floats[codes],), (codes,)))
    return Network(
        candidate.name, tuple(tensors), tuple(operators), candidate.inputs, candidate.outputs
    )
