"""TensorFlow Lite networks cut and mixed: each layer alone on given tensors, some in float."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from slipstream.ship.firmware.network import Network, Operator, Tensor

_GIVEN, _FLOAT = "__reference", "__float"


def on_reference(network: Network, layers: Sequence[int]) -> Network:
    """A copy in which whoever reads a layer reads a new input instead; its outputs are the layers.

    Run on a reference's tensors it gives what each layer makes of right inputs: one layer's error
    reaches no other.

    Args:
        layers: numbers of their tensors; the new inputs come behind the network's own, in order.
    """
    count = len(network.tensors)
    moved = {layer: count + n for n, layer in enumerate(layers)}
    inputs = [replace(network.tensors[n], name=network.tensors[n].name + _GIVEN) for n in layers]
    operators = [
        replace(one, inputs=tuple(moved.get(n, n) for n in one.inputs)) for one in network.operators
    ]
    return Network(
        network.name, (*network.tensors, *inputs), tuple(operators),
        (*network.inputs, *moved.values()), tuple(layers),
    )  # fmt: skip


def hybrid(candidate: Network, reference: Network, keep: Mapping[int, int]) -> Network:
    """A copy of a network in which some layers are the reference's, with its weights, in float.

    Such a layer reads what codes before it stand for, or the floats of a kept layer; whoever reads
    it and is quantised reads its codes.

    Args:
        keep: tensor of the reference's layer by that of the candidate's.
    """
    tensors = list(candidate.tensors)
    operators: list[Operator] = []
    floats: dict[int, int] = {}
    makers = {n: one for one in reference.operators for n in one.outputs}

    def added(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    def float_of(codes: int) -> int:
        tensor = candidate.tensors[codes]
        if tensor.dtype == "float32":
            return codes
        if codes not in floats:
            plain = replace(
                tensor, name=tensor.name + _FLOAT, dtype="float32", quantization=None
            )  # fmt: skip
            floats[codes] = added(plain)
            operators.append(Operator("dequantize", (codes,), (floats[codes],)))
        return floats[codes]

    for one in candidate.operators:
        codes = one.outputs[0] if one.outputs else -1
        if codes not in keep:
            operators.append(one)
            continue
        source = makers[keep[codes]]
        computed = iter([n for n in one.inputs if n >= 0 and candidate.tensors[n].data is None])
        inputs = []
        for n in source.inputs:
            constant = n >= 0 and reference.tensors[n].data is not None
            inputs.append(added(reference.tensors[n]) if constant else
                          n if n < 0 else float_of(next(computed)))  # fmt: skip
        tensor = candidate.tensors[codes]
        if tensor.dtype == "float32":
            operators.append(replace(source, inputs=tuple(inputs), outputs=(codes,)))
            continue
        plain = replace(tensor, name=tensor.name + _FLOAT, dtype="float32", quantization=None)
        floats[codes] = added(plain)
        operators.append(replace(source, inputs=tuple(inputs), outputs=(floats[codes],)))
        operators.append(Operator("quantize", (floats[codes],), (codes,)))
    return Network(
        candidate.name, tuple(tensors), tuple(operators), candidate.inputs, candidate.outputs
    )
