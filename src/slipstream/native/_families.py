"""Which kernels of a family (native/src/FAMILY) this build has and this processor runs."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from slipstream.native.instruction_set import InstructionSet, cpu_features
from slipstream.native.loader import library


@functools.cache
def family_kernels(family: str) -> dict[InstructionSet, int]:
    """The compiled kernels' numbers by instruction set: those that run here, best first.

    ``SLIPSTREAM_INSTRUCTION_SET`` leaves out what is above it. Empty without the library.
    """
    compiled: Any = library()
    if compiled is None:
        return {}
    level_of = getattr(compiled, f"slipstream_{family}_level")
    level_of.restype = ctypes.c_char_p
    count = getattr(compiled, f"slipstream_{family}_kernel_count")()
    built = {InstructionSet(level_of(number).decode()): number for number in range(count)}
    return {level: built[level] for level in cpu_features().levels if level in built}
