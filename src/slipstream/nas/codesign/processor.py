"""Hardware that can be measured: threads, dtype and batch of inference on this processor."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.arguments import as_integer
from slipstream.durations import Durations, TimingRequest, usable_cores
from slipstream.errors import InvalidArgumentError, UnknownNameError, WorkloadError
from slipstream.graph import Call
from slipstream.measure import time_function
from slipstream.nas.codesign.layers import BatchSubnet
from slipstream.nas.codesign.space import HardwareSpace
from slipstream.nas.latency import calls_of
from slipstream.nas.supernet import Supernet
from slipstream.nas.trace import op_name, owner_of
from slipstream.tables import Field, Table
from slipstream.units import format_duration

_DTYPES = ("float32", "bfloat16")
# Samples of the network that the overhead per operator is derived from, and its runs per sample.
_SAMPLES, _INNER = 25, 4


class ProcessorSpace(HardwareSpace):
    """Settings of inference on this processor.

    The time of a network is the sum of its operators' durations, which are timed once per shape,
    dtype and number of threads, and of PyTorch's overhead per operator, which is measured on the
    smallest network.

    Args:
        threads, dtypes, batches: values to choose from; the first of each is the base.
        durations: cache of timings.

    Raises:
        InvalidArgumentError: there is no value, or one is less than 1 or more than the cores.
        UnknownNameError: a dtype is neither float32 nor bfloat16.
    """

    metrics: ClassVar = {"time": "ms", "latency": "ms"}  # per sample and per batch

    def __init__(
        self,
        threads: Sequence[int] = (1, 2),
        dtypes: Sequence[str] = _DTYPES,
        batches: Sequence[int] = (1, 4, 16),
        *,
        durations: Durations | None = None,
    ) -> None:
        cores = usable_cores()
        for name, values in (("threads", threads), ("batches", batches)):
            for value in values:
                as_integer(name, value)
        if max(threads, default=0) > cores:
            raise InvalidArgumentError(
                "threads", f"{max(threads)} is more than {cores} cores", remedy=f"at most {cores}"
            )
        for dtype in dtypes:
            if dtype not in _DTYPES:
                raise UnknownNameError("dtype", dtype, _DTYPES)
        self.values = {
            "threads": tuple(threads), "dtype": tuple(dtypes), "batch": tuple(batches)
        }  # fmt: skip
        for name, options in self.values.items():
            if not options:
                raise InvalidArgumentError(name, "has no values", remedy="for example (1,)")
        self._durations = durations or Durations()
        self._overhead: float | None = None

    def costs(self, net: Supernet, config: Mapping[str, int]) -> dict[str, NDArray[np.float64]]:
        """Return time per sample and latency of a batch of a sub-network, in ms, float64 [points].

        Operators without a cached duration are timed first.
        """
        points = [self.at(point) for point in range(len(self))]
        requests = [[r for _, r in self._requests(net, config, point)] for point in points]
        self._durations.measure(itertools.chain(*requests))
        overhead = self._overhead_ns(net)
        latency = np.array([sum(map(self._time_ns, o)) + len(o) * overhead for o in requests]) / 1e6
        batches = np.array([point["batch"] for point in points], float)
        return {"time": latency / batches, "latency": latency}

    def baseline(self, net: Supernet, config: Mapping[str, int]) -> dict[str, float]:
        """Return the costs of a sub-network with the first value of each setting."""
        return {name: float(column[0]) for name, column in self.costs(net, config).items()}

    def explain(self, net: Supernet, config: Mapping[str, int], point: int) -> Table:
        """Return the predicted time of each operator."""
        rows = [
            (name, self._time_ns(request) + self._overhead_ns(net))
            for name, request in self._requests(net, config, self.at(point))
        ]
        total = sum(time for _, time in rows)
        return Table.of(rows, [
            Field[tuple[str, float]].of("operator", lambda row: row[0]),
            Field[tuple[str, float]].number("time", lambda row: format_duration(row[1])),
            Field[tuple[str, float]].number("of the time", lambda row: f"{row[1] / total:.0%}"),
        ])  # fmt: skip

    def _overhead_ns(self, net: Supernet) -> float:
        """Return the time per operator that PyTorch's modules take around it, measured once."""
        if self._overhead is None:
            config, values = net.space.smallest, {"threads": 1, "dtype": "float32", "batch": 1}
            requests = [request for _, request in self._requests(net, config, values)]
            self._durations.measure(requests)
            module = net.export(config)
            subnet = BatchSubnet(net, config, 1)
            inputs = [
                torch.zeros(subnet.shape(node), dtype=node.meta["val"].dtype)
                for node in net.nodes
                if node.op == "placeholder"
            ]
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                with torch.inference_mode():
                    samples = [
                        time_function(lambda: module(*inputs), _INNER)["wall"]
                        for _ in range(_SAMPLES)
                    ]
            finally:
                torch.set_num_threads(threads)
            extra = min(samples) - sum(map(self._time_ns, requests))
            self._overhead = max(extra / len(requests), 0.0)
        return self._overhead

    def _time_ns(self, request: TimingRequest) -> float:
        timing = self._durations.lookup(request)
        if timing is None:
            raise WorkloadError(
                f"the latency is unknown: '{request.call.name}' cannot be timed alone",
                remedy="search on chips, or keep the operator out of the network",
            )
        return timing.nanoseconds

    def _requests(
        self, net: Supernet, config: Mapping[str, int], values: Mapping[str, Any]
    ) -> list[tuple[str, TimingRequest]]:
        subnet = BatchSubnet(net, config, values["batch"])
        threads, dtype = values["threads"], values["dtype"]
        return [
            (f"{owner_of(node)} {op_name(node)}".strip(),
             TimingRequest(_cast(call, dtype), threads, wall=True, warm=True))
            for node, call in calls_of(subnet)
        ]  # fmt: skip


def _cast(call: Call, dtype: str) -> Call:
    """Return a call with another floating dtype."""

    def new(old: str) -> str:
        return dtype if old == "float32" else old

    return call.with_dtypes(
        [new(spec.dtype) for spec in call.inputs], [new(spec.dtype) for spec in call.outputs]
    )
