"""A duration from the machine's limits: arithmetic, memory, and the cost of a call.

Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
multicore architectures", Communications of the ACM 52(4), 2009.

The limits of a device that nobody measured are those of its data sheet.
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
"""Relative, of a ratio of two rooflines: what 3,250 pairs of calls measured here call for."""
_SIDE = 768
_STREAMED = 1 << 24
_MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
_NEG = "aten::neg(Tensor self) -> Tensor"


@dataclass(frozen=True)
class Limits:
    """What a machine can do at most.

    Attributes:
        flops_per_s: of large matrix products, by dtype.
        bytes_per_s: of streaming through memory, reads and writes added up.
        call_ns: of an operator that has nothing to do.
        provenance: where these come from.
    """

    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    call_ns: float
    provenance: Provenance = Provenance.ROOFLINE

    def least_ns(self, one: Work) -> float | None:
        """The least time for `one`; None for arithmetic in a dtype whose rate is not known."""
        streaming = one.nbytes / self.bytes_per_s * 1e9
        if not one.flops:
            return self.call_ns + streaming
        rate = self.flops_per_s.get(one.dtype)
        if rate is None:
            return None
        return self.call_ns + max(one.flops / rate * 1e9, streaming)


def probes(dtypes: frozenset[str]) -> list[Call]:
    """Calls whose durations are the limits of this machine: `limits` reads them."""
    nothing = TensorSpec("float32", (1,), (1,))
    return [*(_product(dtype) for dtype in sorted(dtypes)), _stream(), _unary(nothing)]


def limits(known: Callable[[Call], float | None], dtypes: frozenset[str]) -> Limits | None:
    """The limits of this machine from the durations of `probes` in ns; None until they are known.

    Args:
        known: the duration of a call, None where it was not measured.
    """
    streaming, nothing = known(_stream()), known(_unary(TensorSpec("float32", (1,), (1,))))
    if not streaming or nothing is None:
        return None
    rates = {
        dtype: 2.0 * _SIDE**3 / took * 1e9
        for dtype in sorted(dtypes)
        if (took := known(_product(dtype)))
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


def scaled(took_ns: float, one: Work, here: Limits, there: Limits) -> float | None:
    """What took `took_ns` within the limits `here`, within those `there`; None for unknown rates.

    The cost of a call changes to that of the other machine; the rest changes with the memory to the
    share `wave_scaling.gamma` and with the arithmetic to what is left. How far from its limits an
    operator stays is taken to be the same on both.
    """
    memory = here.bytes_per_s / there.bytes_per_s
    compute = 1.0
    if one.flops:
        rates = [limits.flops_per_s.get(one.dtype) for limits in (here, there)]
        if rates[0] is None or rates[1] is None:
            return None
        compute = rates[0] / rates[1]
        share = gamma(one.flops, one.nbytes, rates[1], there.bytes_per_s)
    else:
        share = 1.0 if one.nbytes else 0.0
    working = max(took_ns - here.call_ns, 0.0)
    calling = min(took_ns, here.call_ns) * there.call_ns / max(here.call_ns, 1e-9)
    return float(calling + working * memory**share * compute ** (1 - share))


# How data sheets call what torch calls otherwise.
_TORCH_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def device_named(name: str) -> Device | None:
    """The kind of device that a driver calls `name`, as in "NVIDIA A100-SXM4-40GB"; None: unknown.

    Kinds are told by their model number; memory sizes and boards of one model differ.
    """
    words = set(re.findall(r"[A-Z]+[0-9]+", name.upper()))
    for kind, device in device_kinds().items():
        if kind.partition("-")[0].upper() in words:
            return device
    return None


def datasheet_limits(device: Device) -> Limits | None:
    """What `device` can do at most, as its maker says; None where that leaves out the memory."""
    if device.memory_bytes_per_s is None:
        return None
    rates = {
        _TORCH_DTYPES[dtype]: rate.value
        for dtype, rate in device.flops.items()
        if dtype in _TORCH_DTYPES
    }
    launch = device.launch_ns.value if device.launch_ns is not None else 0.0
    return Limits(rates, device.memory_bytes_per_s.value, launch, Provenance.DATASHEET)
