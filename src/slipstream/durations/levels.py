"""Instruction sets of this processor as devices of their own: libraries told to use no newer one.

PyTorch's own kernels obey ``ATEN_CPU_CAPABILITY``, those of oneDNN ``ONEDNN_MAX_CPU_ISA``, ours
``SLIPSTREAM_INSTRUCTION_SET``. Other libraries (MKL on some processors) choose by themselves,
whatever they are told; what is measured under a level is measured with them, so that it holds for
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.errors import UnknownNameError

CAPS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""What holds PyTorch's libraries to an instruction set."""


@dataclass(frozen=True)
class Level:
    """An instruction set.

    Attributes:
        name: ours, "avx2".
        capability: what ``torch.backends.cpu.get_cpu_capability()`` calls it.
        environment: variables of a process that uses no newer one.
        flags: that a processor needs, by Linux's names.
    """

    name: str
    capability: str
    environment: Mapping[str, str]
    flags: frozenset[str]


LEVELS = (
    Level(
        "avx512", "AVX512",
        {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "ALL"},
        frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    ),
    Level(
        "avx2", "AVX2",
        {
            "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
            "SLIPSTREAM_INSTRUCTION_SET": "avx2",
        },
        frozenset({"avx2", "fma"}),
    ),
    Level(
        "sse4.1", "DEFAULT",
        {
            "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41",
            "SLIPSTREAM_INSTRUCTION_SET": "scalar",
        },
        frozenset({"sse4_1"}),
    ),
)  # fmt: skip
"""From the newest to the oldest."""


def level(name: str) -> Level:
    """The level of that name; "sse41" is "sse4.1".

    Raises:
        UnknownNameError: there is none.
    """
    for one in LEVELS:
        if one.name.replace(".", "") == name.lower().replace(".", "").replace("-", ""):
            return one
    raise UnknownNameError("instruction set", name, [one.name for one in LEVELS])


def level_of(capability: str) -> Level | None:
    """The level that torch calls `capability`; None for one that is not ours (ARM's, IBM's)."""
    return next((one for one in LEVELS if one.capability == capability.upper()), None)


def levels_here() -> tuple[Level, ...]:
    """The levels that this processor has."""
    from slipstream.measure.environment import processor_flags

    flags = processor_flags()
    return tuple(one for one in LEVELS if one.flags <= flags)
