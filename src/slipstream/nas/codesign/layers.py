"""Layers of a sub-network: products for an accelerator's array, and operators for its vector unit.

Batch norm and ReLU directly behind a product run in its output stage and are free. Every other
operator that is not a view takes time and energy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from slipstream.errors import WorkloadError
from slipstream.graph.call import ITEM_BYTES
from slipstream.graph.traffic import OperatorClass, map_operations, operator_class, traffic
from slipstream.hardware import LayerShape, Pass
from slipstream.nas.coupling import RECURRENT, argument
from slipstream.nas.latency import call_of
from slipstream.nas.supernet import Subnet, Supernet
from slipstream.nas.trace import op_name, owner_of

_MATMULS = ("matmul", "mm", "bmm", "linear")
# Products that `operator_class` does not name, because recorded steps have them in other forms.
_REFUSED = RECURRENT | {
    "conv3d", "conv_transpose3d", "tensordot", "bilinear", "inner", "linalg_multi_dot",
    "chain_matmul", "cdist",
}  # fmt: skip
_OUTPUT_STAGE = ("batch_norm", "relu", "relu6", "hardtanh", "clamp", "clamp_min")
_SOFTMAX_OPERATIONS = 5
_MIN_DIMENSIONS = 2


class BatchSubnet(Subnet):
    """A sub-network whose shapes have another batch than the example inputs.

    Args:
        batch: samples per inference.

    Raises:
        WorkloadError: the model was traced for one batch size only.
    """

    def __init__(self, net: Supernet, config: Mapping[str, Any], batch: int) -> None:
        super().__init__(net, net.space.checked(config))
        sizes = [n.meta["val"].shape[:1] for n in net.nodes if n.op == "placeholder"]
        size, *_ = [size for shape in sizes for size in shape] or [1]
        # Sizes that the model's code fixes remain symbols, with a constant value.
        fixed = size if isinstance(size, int) else size.node.maybe_as_int()
        self.batch, self.traced = batch, int(size.node.hint) if fixed is None else fixed
        if fixed not in (None, batch):
            raise WorkloadError(
                f"the model was traced for a batch of {fixed} only, not {batch}", where="inputs",
                remedy=f"derive the space from inputs with a batch of {batch}",
            )  # fmt: skip

    def shape(self, node: Node) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        found, value = super().shape(node), node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return found
        return tuple(
            size if isinstance(traced, int) else size * self.batch // self.traced
            for size, traced in zip(found, value.shape, strict=True)
        )


@dataclass(frozen=True)
class NetworkLayer:
    """A product of the array, or an operator of the vector unit.

    Attributes:
        name: qualified name of the module, and the operator.
        product: shape and pass of a product; None for the vector unit.
        operations: operations of the vector unit.
        elements: values that the vector unit reads from DRAM and writes to it.
    """

    name: str
    product: tuple[LayerShape, Pass] | None
    operations: int = 0
    elements: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of the cost."""
        return self.product or (self.operations, self.elements)


def network_layers(
    net: Supernet, config: Mapping[str, int], *, batch: int = 1
) -> list[NetworkLayer]:
    """Return the layers of a sub-network that take time, in order, from shapes alone.

    Args:
        batch: samples per inference.

    Raises:
        WorkloadError: an operator has no layer, such as an LSTM's or a convolution with three
            spatial dimensions, or the model was traced for one batch size only.
    """
    subnet = BatchSubnet(net, config, batch)
    nodes = [node for node in net.nodes if subnet.runs(node)]

    def made_by(node: Node) -> Node:
        # The sum of a skipped block is its shortcut, which may be such a sum, too.
        while node in subnet.skipped:
            node = subnet.skipped[node]
        return node

    readers = Counter(made_by(operand) for node in nodes for operand in node.all_input_nodes)
    staged: set[Node] = set()
    layers = []
    for node in nodes:
        found = list(_layers(subnet, node))
        first = node.args[0] if node.args else None
        made = made_by(first) if isinstance(first, Node) else node
        if any(layer.product for layer in found):
            staged.add(node)
        elif op_name(node) in _OUTPUT_STAGE and made in staged and readers[made] == 1:
            staged.add(node)
            continue
        layers += found
    return layers


def _layers(subnet: Subnet, node: Node) -> Iterator[NetworkLayer]:
    name = op_name(node)
    label = f"{owner_of(node)} {name}".strip()
    call = call_of(subnet, node)
    if call is None:
        return
    if name in ("conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d"):
        yield NetworkLayer(label, _convolution(subnet, node, name))
        return
    if name in _MATMULS and min(len(spec.shape) for spec in call.inputs) >= (
        1 if name == "linear" else _MIN_DIMENSIONS
    ):
        yield NetworkLayer(label, (_matmul(subnet, node, name), Pass.FORWARD))
        return
    if name == "scaled_dot_product_attention":
        query, key, value = (subnet.shape(argument(node, n)) for n in range(3))
        heads, rows = math.prod(query[:-2]), query[-2]
        for inner, outer in ((query[-1], key[-2]), (key[-2], value[-1])):
            shape = LayerShape(1, heads * inner, heads * outer, 1, rows, groups=heads)
            yield NetworkLayer(label, (shape, Pass.FORWARD))
        scores = heads * rows * key[-2]
        yield NetworkLayer(f"{label}, softmax", None, _SOFTMAX_OPERATIONS * scores, 2 * scores)
        return
    kind = operator_class(call)
    if kind is OperatorClass.CONTRACTION or name in _REFUSED:
        raise WorkloadError(
            f"an accelerator cannot run '{name}'", where=owner_of(node) or "the model",
            remedy="express it as linear layers, convolutions of one or two dimensions or matmuls",
        )  # fmt: skip
    moved = traffic(call).total
    if kind is not OperatorClass.VIEW and name != "dropout" and moved:
        item = ITEM_BYTES.get(call.outputs[0].dtype, 4) if call.outputs else 4
        yield NetworkLayer(label, None, map_operations(call), -(-moved // item))


def _matmul(subnet: Subnet, node: Node, name: str) -> LayerShape:
    x, other = subnet.shape(argument(node, 0)), subnet.shape(argument(node, 1))
    outputs = other[0] if name == "linear" else other[-1]
    if name == "linear" or len(other) == _MIN_DIMENSIONS:
        return LayerShape(1, x[-1], outputs, 1, math.prod(x[:-1]))
    groups = math.prod(subnet.shape(node)[:-2])
    return LayerShape(1, groups * x[-1], groups * outputs, 1, x[-2], groups=groups)


def _convolution(subnet: Subnet, node: Node, name: str) -> tuple[LayerShape, Pass]:
    transposed = "transpose" in name
    _, args, _ = subnet.call(node)
    places = (3, 4, 7, 6) if transposed else (3, 4, 5, 6)
    stride, padding, dilation, groups = (
        args[n] if n < len(args) else argument(node, n) for n in places
    )
    x, weight, y = (subnet.shape(n) for n in (argument(node, 0), argument(node, 1), node))
    dims = len(weight) - 2
    kernel = _pair(weight[2:], dims, 1)
    steps, reach = _pair(stride, dims, 1), _pair(dilation, dims, 1)
    if isinstance(padding, str):
        total = [
            d * (k - 1) if padding == "same" else 0 for d, k in zip(reach, kernel, strict=True)
        ]
        # An odd total has its larger half at the end, as one more row of the input.
        edge, extra = [n // 2 for n in total], [n % 2 for n in total]
    else:
        edge, extra = list(_pair(padding, dims, 0)), [0, 0]
    if transposed:
        # The gradient of the input of a convolution from y to x.
        x, y = y, x
    h, w = _pair(x[2:], dims, 1)
    shape = LayerShape(
        x[0], x[1], y[1], h + extra[0], w + extra[1], *kernel, steps, (edge[0], edge[1]), reach,
        groups,
    )  # fmt: skip
    return shape, Pass.INPUT if transposed else Pass.FORWARD


def _pair(values: Any, dims: int, missing: int) -> tuple[int, int]:
    """Return (vertical, horizontal) values; one value of one dimension is horizontal."""
    several = (list(values) * dims)[:dims] if len(values) == 1 else list(values)
    return (several[0] if dims > 1 else missing), several[-1]
