"""Durations from the machine's limits: arithmetic, memory, and the overhead of a call.

Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
multicore architectures", Communications of the ACM 52(4), 2009.

A device without measurements has the limits of its data sheet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slipstream.cluster.devices import Device, device_kinds
from slipstream.durations.wave_scaling import gamma
from slipstream.durations.work import Work, work
from slipstream.graph import Call, TensorSpec
from slipstream.provenance import Provenance

SPREAD = 0.7
"""Relative spread of a ratio of two rooflines, from 3,250 measured pairs of calls."""
_SIDE = 768
_STREAMED = 1 << 24
_MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
_NEG = "aten::neg(Tensor self) -> Tensor"


@dataclass(frozen=True)
class Limits:
    """Maximum rates of a machine.

    Attributes:
        flops_per_s: of large matrix products, by dtype.
        bytes_per_s: of streaming, the sum of reads and writes.
        call_ns: duration of an operator on one element.
        provenance: source of these numbers.
    """

    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    call_ns: float
    provenance: Provenance = Provenance.ROOFLINE

    def min_ns(self, amount: Work) -> float | None:
        """Return the minimum time for an amount of work; None for a dtype of unknown rate."""
        streaming = amount.nbytes / self.bytes_per_s * 1e9
        if not amount.flops:
            return self.call_ns + streaming
        rate = self.flops_per_s.get(amount.dtype)
        if rate is None:
            return None
        return self.call_ns + max(amount.flops / rate * 1e9, streaming)


def probes(dtypes: frozenset[str]) -> list[Call]:
    """Return the calls whose durations `limits` reads."""
    nothing = TensorSpec("float32", (1,), (1,))
    return [*(_product(dtype) for dtype in sorted(dtypes)), _stream(), _unary(nothing)]


def limits(duration_ns: Callable[[Call], float | None], dtypes: frozenset[str]) -> Limits | None:
    """Return the limits of this machine from `probes`; None until they are measured.

    Args:
        duration_ns: function that returns the duration of a call, None if it was not measured.
    """
    streaming, nothing = map(duration_ns, (_stream(), _unary(TensorSpec("float32", (1,), (1,)))))
    if not streaming or nothing is None:
        return None
    rates = {
        dtype: 2.0 * _SIDE**3 / elapsed_ns * 1e9
        for dtype in sorted(dtypes)
        if (elapsed_ns := duration_ns(_product(dtype)))
    }
    streamed = work(_stream())
    assert streamed is not None
    return Limits(rates, streamed.nbytes / streaming * 1e9, nothing)


def _product(dtype: str) -> Call:
    square = TensorSpec(dtype, (_SIDE, _SIDE), (_SIDE, 1))
    return Call(_MM, (square, square), (square,))


def _stream() -> Call:
    return _unary(TensorSpec("float32", (_STREAMED,), (1,)))


def _unary(spec: TensorSpec) -> Call:
    return Call(_NEG, (spec,), (spec,))


def scaled(elapsed_ns: float, amount: Work, source: Limits, target: Limits) -> float | None:
    """Scale a duration from one machine's limits to another's; None for unknown rates.

    The overhead of a call changes to the target's. The rest scales with the bandwidth to the power
    `wave_scaling.gamma`, and with the arithmetic to the remaining power. The operator's efficiency
    relative to its limits is assumed to be the same.
    """
    memory = source.bytes_per_s / target.bytes_per_s
    compute = 1.0
    if amount.flops:
        rates = [limits.flops_per_s.get(amount.dtype) for limits in (source, target)]
        if rates[0] is None or rates[1] is None:
            return None
        compute = rates[0] / rates[1]
        share = gamma(amount.flops, amount.nbytes, rates[1], target.bytes_per_s)
    else:
        share = 1.0 if amount.nbytes else 0.0
    working = max(elapsed_ns - source.call_ns, 0.0)
    calling = min(elapsed_ns, source.call_ns) * target.call_ns / max(source.call_ns, 1e-9)
    return float(calling + working * memory**share * compute ** (1 - share))


# torch's names of dtypes in data sheets.
_TORCH_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def device_named(name: str) -> Device | None:
    """Return the device a driver calls `name`, such as "NVIDIA A100-SXM4-40GB", or None.

    Matches the model number only, since boards of a model differ in memory size and name.
    """
    words = set(re.findall(r"[A-Z]+[0-9]+", name.upper()))
    for kind, device in device_kinds().items():
        if kind.partition("-")[0].upper() in words:
            return device
    return None


def datasheet_limits(device: Device) -> Limits | None:
    """Return the limits from a data sheet; None if it lacks the memory bandwidth."""
    if device.memory_bytes_per_s is None:
        return None
    rates = {
        _TORCH_DTYPES[dtype]: rate.value
        for dtype, rate in device.flops.items()
        if dtype in _TORCH_DTYPES
    }
    launch = device.launch_ns.value if device.launch_ns is not None else 0.0
    return Limits(rates, device.memory_bytes_per_s.value, launch, Provenance.DATASHEET)
