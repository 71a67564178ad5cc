"""ctypes bindings of ``native/include/slipstream/lowbit.h``: available kernels and their calls."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from slipstream.native import InstructionSet
from slipstream.native.family import FLOAT, INT32, INT64, POINTER, TEXT, UINT8, UINT32, Family

OK = 0
INVALID = 1

_i32, _i64, _f32, _ptr = INT32, INT64, FLOAT, POINTER


@dataclass(frozen=True)
class Kernel:
    """A multiplication scheme compiled for an instruction set.

    Attributes:
        index: its index in the compiled library.
        scheme: name of the algorithm: ``dense``, ``deferred``, ``bit_serial``, ...
        level: the instruction set.
    """

    index: int
    scheme: str
    level: InstructionSet

    def supports(self, weight_bits: int, activation_bits: int) -> bool:
        """Return whether the kernel multiplies weights and activations of these bits."""
        bound = lowbit_library()
        if bound is None:
            return False
        return bool(bound.slipstream_lowbit_supports(self.index, weight_bits, activation_bits))


_FAMILY = Family("lowbit", {
    "cpu_features": [],
    "spin": [_i64],
    "lowbit_kernel_count": [],
    "lowbit_scheme": [_i32],
    "lowbit_level": [_i32],
    "lowbit_features": [_i32],
    "lowbit_spin": [_i32, _i64],
    "lowbit_supports": [_i32, _i32, _i32],
    "lowbit_pack": [_i32, _i64, _i64, _i32, _i32, _ptr, _i64, _ptr, ctypes.POINTER(_ptr)],
    "lowbit_free": [_ptr],
    "lowbit_bytes": [_ptr],
    "lowbit_multiply": [_ptr, _ptr, _i32, _i64, _i64, _i32, _ptr, _i64, _i32],
    "lowbit_linear": [_ptr, _ptr, _i64, _i64, _f32, _i32, _ptr, _ptr, _f32, _ptr, _i64, _i32],
    "quantise": [_i32, _ptr, _i64, _f32, _i32, _i32, _ptr],
    "finish": [_i32, _ptr, _ptr, _i64, _i64, _i64, _ptr],
    "max_pool": [_i32, _ptr, _ptr, _ptr],
    "patches": [_ptr, _ptr, UINT8, _i64, _i64, _ptr],
    "convolve": [_i32, _ptr, _ptr, _i32, _ptr, _i64, _ptr, _ptr, _i32],
    "depthwise": [_i32, _ptr, _ptr, _i32, _i32, _ptr, _ptr, _ptr, _i32],
}, {
    "cpu_features": UINT32, "spin": None, "lowbit_scheme": TEXT, "lowbit_level": TEXT,
    "lowbit_features": UINT32, "lowbit_spin": _i64, "lowbit_free": None, "lowbit_bytes": _i64,
    "patches": None,
})  # fmt: skip


def lowbit_library() -> ctypes.CDLL | None:
    """Return the compiled library with declared functions, or None if it is not installed."""
    compiled: ctypes.CDLL | None = _FAMILY.library
    return compiled


@functools.cache
def _kernels_of(bound: ctypes.CDLL) -> tuple[Kernel, ...]:
    features = int(bound.slipstream_cpu_features())
    usable = []
    for index in range(bound.slipstream_lowbit_kernel_count()):
        required = int(bound.slipstream_lowbit_features(index))
        if required & ~features == 0:
            scheme = bound.slipstream_lowbit_scheme(index).decode()
            level = bound.slipstream_lowbit_level(index).decode()
            usable.append(Kernel(index, scheme, InstructionSet(level)))
    return tuple(usable)


def kernels() -> tuple[Kernel, ...]:
    """Return the kernels of the compiled library that this processor supports."""
    bound = lowbit_library()
    return () if bound is None else _kernels_of(bound)
