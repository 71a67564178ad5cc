"""ctypes over ``native/include/slipstream/lowbit.h``: which kernels there are, and their calls."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from slipstream.native import InstructionSet, cpu_features, library

OK = 0
INVALID = 1

_i32, _i64, _f32, _ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

# From the plainest to the best, for each family of processors.
_LADDERS = (
    (
        InstructionSet.SCALAR,
        InstructionSet.AVX2,
        InstructionSet.AVX512BW,
        InstructionSet.AVX512,
    ),
    (InstructionSet.SCALAR, InstructionSet.NEON, InstructionSet.NEON_DOTPROD),
)


@dataclass(frozen=True)
class Kernel:
    """One scheme written for one instruction set.

    Attributes:
        index: its number in the compiled library.
        scheme: how it multiplies: ``dense``, ``deferred``, ``bit_serial``, ...
    """

    index: int
    scheme: str
    level: InstructionSet

    def supports(self, weight_bits: int, activation_bits: int) -> bool:
        """Whether it multiplies weights and activations of this many bits."""
        bound = lowbit_library()
        if bound is None:
            return False
        return bool(bound.slipstream_lowbit_supports(self.index, weight_bits, activation_bits))


@functools.cache
def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    found.slipstream_cpu_features.restype = ctypes.c_uint32
    found.slipstream_spin.restype = None
    found.slipstream_spin.argtypes = (_i64,)
    found.slipstream_lowbit_kernel_count.restype = _i32
    found.slipstream_lowbit_scheme.restype = ctypes.c_char_p
    found.slipstream_lowbit_scheme.argtypes = (_i32,)
    found.slipstream_lowbit_level.restype = ctypes.c_char_p
    found.slipstream_lowbit_level.argtypes = (_i32,)
    found.slipstream_lowbit_features.restype = ctypes.c_uint32
    found.slipstream_lowbit_features.argtypes = (_i32,)
    found.slipstream_lowbit_spin.restype = _i64
    found.slipstream_lowbit_spin.argtypes = (_i32, _i64)
    found.slipstream_lowbit_supports.restype = _i32
    found.slipstream_lowbit_supports.argtypes = (_i32, _i32, _i32)
    found.slipstream_lowbit_pack.restype = _i32
    found.slipstream_lowbit_pack.argtypes = (
        *(_i32, _i64, _i64, _i32, _i32),
        *(_ptr, _i64, _ptr, ctypes.POINTER(_ptr)),
    )
    found.slipstream_lowbit_free.restype = None
    found.slipstream_lowbit_free.argtypes = (_ptr,)
    found.slipstream_lowbit_bytes.restype = _i64
    found.slipstream_lowbit_bytes.argtypes = (_ptr,)
    found.slipstream_lowbit_multiply.restype = _i32
    found.slipstream_lowbit_multiply.argtypes = (
        *(_ptr, _ptr, _i32, _i64, _i64, _i32),
        *(_ptr, _i64, _i32),
    )
    found.slipstream_lowbit_linear.restype = _i32
    found.slipstream_lowbit_linear.argtypes = (
        *(_ptr, _ptr, _i64, _i64, _f32, _i32),
        *(_ptr, _ptr, _f32, _ptr, _i64, _i32),
    )
    return found


def lowbit_library() -> ctypes.CDLL | None:
    """The compiled library with the kernels' functions declared, or None where there is none."""
    found = library()
    return None if found is None else _declared(found)


@functools.cache
def _kernels_of(bound: ctypes.CDLL) -> tuple[Kernel, ...]:
    here = int(bound.slipstream_cpu_features())
    found = []
    for index in range(bound.slipstream_lowbit_kernel_count()):
        needed = int(bound.slipstream_lowbit_features(index))
        if needed & ~here == 0:
            scheme = bound.slipstream_lowbit_scheme(index).decode()
            level = bound.slipstream_lowbit_level(index).decode()
            found.append(Kernel(index, scheme, InstructionSet(level)))
    return tuple(found)


def kernels() -> tuple[Kernel, ...]:
    """The kernels of the compiled library that this processor can run."""
    bound = lowbit_library()
    return () if bound is None else _kernels_of(bound)


def levels() -> tuple[InstructionSet, ...]:
    """The instruction sets kernels may be chosen from, best first.

    ``SLIPSTREAM_INSTRUCTION_SET`` in the environment leaves out what is above it.
    """
    features = cpu_features()
    best = features.best
    ladder = next(ladder for ladder in _LADDERS if best in ladder)
    below = ladder[: ladder.index(best) + 1]
    return tuple(level for level in reversed(below) if features.runs(level))
