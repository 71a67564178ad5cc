"""Limits of this machine by size, since caches have more bandwidth than memory.

Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
multicore architectures", CACM 52(4), 2009, with a ceiling for every level of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.durations.durations import Durations, TimingRequest
from slipstream.durations.movement import Moved
from slipstream.durations.work import work
from slipstream.graph import Call, TensorSpec
from slipstream.graph.traffic import traffic

_NEG = "aten::neg(Tensor self) -> Tensor"
_MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
_COPY = "aten::copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)"
_ADD = "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"
_NEG_IN_PLACE = "aten::neg_(Tensor(a!) self) -> Tensor(a!)"
_SUM = "aten::sum(Tensor self, *, ScalarType? dtype=None) -> Tensor"
_STREAMS = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
# Libraries reach their maximum rate of matrix products at different sizes.
_SIDES = (512, 1024, 2048)


@dataclass(frozen=True)
class Peaks:
    """Maximum rates of the machine.

    Attributes:
        flops_per_s: of matrix products by dtype, the maximum over several sizes.
        streams: (bytes, bytes/s) of the fastest sweep over that many bytes, ascending.
        call_ns: duration of a call on one element.
    """

    flops_per_s: Mapping[str, float]
    streams: tuple[tuple[int, float], ...]
    call_ns: float

    def bytes_per_s(self, nbytes: int) -> float:
        """Return the maximum bandwidth for `nbytes`: that of sweeps of at least half the size.

        Half the size, since an operator's inputs may be in a cache that its outputs do not fit.
        """
        rates = [rate for size, rate in self.streams if 2 * size >= nbytes]
        return max(rates, default=self.streams[-1][1])

    def min_ns(self, moved: Moved, call: Call) -> float:
        """Return the minimum time of an operator, bound by its bytes or its arithmetic."""
        streaming = moved.moved_bytes / self.bytes_per_s(moved.moved_bytes) * 1e9
        call_work = work(call)
        rate = None if call_work is None else self.flops_per_s.get(call_work.dtype)
        computing = call_work.flops / rate * 1e9 if call_work is not None and rate else 0.0
        return max(streaming, computing)

    def to_json(self) -> dict[str, Any]:
        """Return the limits as JSON values."""
        return {
            "flops_per_s": dict(self.flops_per_s), "call_ns": self.call_ns,
            "bytes_per_s": {str(size): rate for size, rate in self.streams},
        }  # fmt: skip


def probes(dtypes: frozenset[str]) -> list[Call | TimingRequest]:
    """Return the calls whose durations `peaks_of` reads."""
    products = [_product(dtype, side) for dtype in sorted(dtypes) for side in _SIDES]
    sweeps = [TimingRequest(call, warm=True) for size in _STREAMS for call in _sweeps(size)]
    return [*products, *sweeps, _sweeps(1)[0]]


def peaks_of(durations: Durations, dtypes: frozenset[str]) -> Peaks | None:
    """Return the limits from measured `probes`; None if a required one is missing."""
    rates: dict[str, float] = {}
    for dtype in sorted(dtypes):
        measured = [
            2.0 * side**3 / answer.nanoseconds * 1e9
            for side in _SIDES
            if (answer := durations.lookup(_product(dtype, side))) is not None
        ]
        if measured:
            rates[dtype] = max(measured)
    streams = []
    for size in _STREAMS:
        speeds = [
            traffic(call).total / answer.nanoseconds * 1e9
            for call in _sweeps(size)
            if (answer := durations.lookup(TimingRequest(call, warm=True))) and answer.nanoseconds
        ]
        if not speeds:
            # Without one of the sizes, operators would exceed the limits.
            return None
        streams.append((8 * size, max(speeds)))
    nothing = durations.lookup(_sweeps(1)[0])
    if nothing is None:
        return None
    return Peaks(rates, tuple(streams), nothing.nanoseconds)


def _product(dtype: str, side: int) -> Call:
    square = TensorSpec(dtype, (side, side), (side, 1))
    return Call(_MM, (square, square), (square,))


def _sweeps(elements: int) -> list[Call]:
    spec = TensorSpec("float32", (elements,), (1,))
    scalar = TensorSpec("float32", (), ())
    return [
        Call(_NEG, (spec,), (spec,)),
        Call(_COPY, (spec, spec, False), (spec,)),
        Call(_NEG_IN_PLACE, (spec,), (spec,)),
        Call(_ADD, (spec, spec, 1), (spec,)),
        Call(_SUM, (spec, None), (scalar,)),
    ]
