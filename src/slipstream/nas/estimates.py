"""Parameters, multiplications and bytes of a sub-network, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from slipstream.nas.coupling import RECURRENT, argument
from slipstream.nas.supernet import Subnet, Supernet, need_supernet
from slipstream.nas.trace import op_name
from slipstream.search import Candidate

METRICS = {"params": "", "macs": "", "weight_bytes": "B"}
"""Metrics of `estimate` with their units."""


def estimate(net: Supernet, config: Mapping[str, Any] | Candidate | None = None) -> dict[str, int]:
    """Return the size and work of a sub-network without building it.

    Args:
        config: configuration; None for the current one.

    Returns:
        ``params``: elements of parameters. ``macs``: multiply-accumulates of convolutions, linear
        and recurrent layers, matmuls and attention per sample of the example batch.
        ``weight_bytes``: bytes of parameters and buffers.
    """
    chosen = need_supernet(net).config if config is None else net.space.checked(config)
    subnet = Subnet(net, chosen)
    params = size = macs = 0
    seen: set[int] = set()
    batch = 1
    used = {s for n in net.nodes if subnet.runs(n) for s in n.all_input_nodes}
    for node in net.nodes:
        if node.op == "placeholder" and node.meta["val"].dim():
            batch = subnet.shape(node)[0]
        if node.op == "get_attr" and node in used:
            tensor = net.tensor(str(node.target))
            if id(tensor) not in seen:
                seen.add(id(tensor))
                count = math.prod(subnet.shape(node))
                params += count if isinstance(tensor, nn.Parameter) else 0
                size += count * tensor.element_size()
        elif subnet.runs(node):
            macs += _macs(subnet, node)
    return {"params": params, "macs": macs // batch, "weight_bytes": size}


def _macs(subnet: Subnet, node: Any) -> int:
    name = op_name(node)
    if name.startswith("conv"):
        positions = subnet.shape(node.args[0] if "transpose" in name else node)
        weight = subnet.shape(node.args[1])
        return positions[0] * math.prod(positions[2:]) * math.prod(weight)
    if name in ("linear", "matmul", "bmm", "mm"):
        return math.prod(subnet.shape(node)) * subnet.shape(node.args[0])[-1]
    if name == "scaled_dot_product_attention":
        query, key = subnet.shape(node.args[0]), subnet.shape(node.args[1])
        return math.prod(query[:-1]) * key[-2] * (query[-1] + subnet.shape(node)[-1])
    if name in RECURRENT:
        x = subnet.shape(node.args[0])
        weights = [subnet.shape(w) for w in argument(node, 2)]
        return x[0] * x[1] * sum(math.prod(w) for w in weights if len(w) == 2)
    return 0
