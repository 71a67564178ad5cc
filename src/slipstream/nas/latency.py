"""Latency of a sub-network on this machine, from the durations of its operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from slipstream.durations import Durations, TimingRequest
from slipstream.errors import WorkloadError
from slipstream.graph import Call, TensorSpec
from slipstream.graph.traffic import is_view
from slipstream.nas.supernet import Subnet, Supernet, need_supernet
from slipstream.nas.trace import op_name
from slipstream.search import Candidate

# Sub-networks whose operators are timed before a search, and the number of operators.
_SAMPLES, _MAX_AHEAD = 256, 512


def predict_latency(
    net: Supernet,
    config: Mapping[str, Any] | Candidate | None = None,
    *,
    durations: Durations | None = None,
) -> float:
    """Return the predicted milliseconds of an inference of a sub-network, without building it.

    It is the sum of the durations of its operators at the sub-network's shapes, on the batch of the
    example inputs. Operators without a cached duration are timed first.

    Args:
        config: configuration; None for the current one.
        durations: cache of timings, which has the number of threads; None for one thread.

    Raises:
        WorkloadError: an operator cannot be timed alone.
    """
    durations = durations or Durations()
    chosen = need_supernet(net).config if config is None else net.space.checked(config)
    requests = _requests(net, chosen)
    durations.measure(requests)
    timings = [durations.lookup(request) for request in requests]
    failed = [r.call.name for r, timing in zip(requests, timings, strict=True) if timing is None]
    if failed:
        raise WorkloadError(
            f"the latency is unknown: {', '.join(sorted(set(failed)))} cannot be timed alone",
            remedy="constrain macs or params instead",
        )  # fmt: skip
    return sum(timing.nanoseconds for timing in timings if timing is not None) / 1e6


def time_ahead(net: Supernet, durations: Durations) -> None:
    """Time the operators of random sub-networks together, since each batch starts a process."""
    rng, requests = np.random.default_rng(0), dict[str, TimingRequest]()
    for _ in range(_SAMPLES):
        if len(requests) < _MAX_AHEAD:
            requests |= {r.key: r for r in _requests(net, net.space.sample(rng))}
    durations.measure(requests.values())


def _requests(net: Supernet, config: Mapping[str, int]) -> list[TimingRequest]:
    # The previous operator has just written the operands, and weights of small models stay cached.
    return [TimingRequest(call, warm=True) for _, call in calls_of(Subnet(net, config))]


def calls_of(subnet: Subnet) -> Iterator[tuple[Node, Call]]:
    """Yield the nodes of a sub-network that call operators, and their calls, without views."""
    for node in subnet.net.nodes:
        value = node.meta.get("val")
        tensors = value if isinstance(value, (list, tuple)) else (value,)
        if subnet.runs(node) and any(isinstance(tensor, torch.Tensor) for tensor in tensors):
            call = call_of(subnet, node)
            if call is not None and not is_view(call) and op_name(node) != "dropout":
                yield node, call


def call_of(subnet: Subnet, node: Node) -> Call | None:
    """Return the operator call of a node in a sub-network; None if it calls no operator."""
    target, args, kwargs = subnet.call(node)
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    values = [
        args[n] if n < len(args) else kwargs.get(a.name, a.default_value)
        for n, a in enumerate(schema.arguments)
    ]
    arguments = tuple(_argument(subnet, value) for value in values)
    tensor = node.meta["val"]
    outputs = (_spec(subnet, node),) if isinstance(tensor, torch.Tensor) else ()
    return Call(str(schema), arguments, outputs)


def _argument(subnet: Subnet, value: Any) -> Any:
    if isinstance(value, Node):
        number = value.meta.get("val")
        if value.op == "get_attr" or isinstance(number, torch.Tensor):
            return _spec(subnet, value)
        return int(number.node.hint) if isinstance(number, torch.SymInt) else number
    if isinstance(value, (list, tuple)):
        return tuple(_argument(subnet, item) for item in value)
    return value if isinstance(value, (int, float, bool, str, type(None))) else None


def _spec(subnet: Subnet, node: Node) -> TensorSpec:
    """Return the spec of a tensor, whose dimensions are in memory in their recorded order."""
    shape = subnet.shape(node)
    value = node.meta.get("val")
    whole = value if isinstance(value, torch.Tensor) else subnet.net.tensor(str(node.target))
    steps = [s if isinstance(s, int) else int(s.node.hint) for s in whole.stride()]
    strides, size = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (steps[dim], -dim)):
        strides[dim] = size if steps[dim] else 0
        size *= shape[dim] if steps[dim] else 1
    dtype = str(whole.dtype).removeprefix("torch.")
    return TensorSpec(dtype, shape, tuple(strides), whole.device.type)
