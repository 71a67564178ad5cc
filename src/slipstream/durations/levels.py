"""Instruction sets of this processor, as limits of what libraries may use.

PyTorch's own kernels obey ``ATEN_CPU_CAPABILITY``, those of oneDNN ``ONEDNN_MAX_CPU_ISA``, ours
``SLIPSTREAM_INSTRUCTION_SET``. Other libraries (MKL on some processors) ignore such limits; timings
under a level include them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.errors import UnknownNameError

CAPS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""Variables that limit the instruction sets of PyTorch's libraries."""


@dataclass(frozen=True)
class Level:
    """An instruction set.

    Attributes:
        name: slipstream's name, such as "avx2".
        capability: name in ``torch.backends.cpu.get_cpu_capability()``.
        environment: variables of a process that uses no newer instruction set.
        flags: required processor flags, as named by Linux.
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
"""All levels, newest first."""


def level(name: str) -> Level:
    """Return the level called `name`; "sse41" is "sse4.1".

    Raises:
        UnknownNameError: no level has this name.
    """
    for candidate in LEVELS:
        if candidate.name.replace(".", "") == name.lower().replace(".", "").replace("-", ""):
            return candidate
    raise UnknownNameError("instruction set", name, [candidate.name for candidate in LEVELS])


def level_of(capability: str) -> Level | None:
    """Return the level of torch's `capability`; None for other architectures."""
    return next((level for level in LEVELS if level.capability == capability.upper()), None)


def levels_here() -> tuple[Level, ...]:
    """Return the levels that this processor supports."""
    from slipstream.measure.environment import processor_flags

    flags = processor_flags()
    return tuple(level for level in LEVELS if level.flags <= flags)
