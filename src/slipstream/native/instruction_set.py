"""Instruction sets of this CPU, for selecting kernels and for ``doctor``."""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import UnknownNameError
from slipstream.native.loader import library


class InstructionSet(enum.StrEnum):
    """Levels that kernels may require."""

    SCALAR = "scalar"
    AVX2 = "avx2"
    """x86-64 with AVX2 and FMA."""
    AVXVNNI = "avxvnni"
    """AVX2 and the 256-bit int8 dot product: client CPUs from Alder Lake."""
    AVX512BW = "avx512bw"
    """AVX-512 F, BW, DQ and VL: Skylake-SP and later."""
    AVX512VNNI = "avx512vnni"
    """As `AVX512BW`, with VNNI: Cascade Lake, Cooper Lake and later."""
    AVX512 = "avx512"
    """AVX-512 F, BW, DQ, VL, VNNI, VBMI and VPOPCNTDQ: Ice Lake, Zen 4 and later."""
    AMX = "amx"
    """x86-64 with int8 tiles: Sapphire Rapids and later."""
    NEON = "neon"
    NEON_DOTPROD = "neon_dotprod"
    """AArch64 with the int8 dot product (Armv8.2)."""


@dataclass(frozen=True)
class CpuFeatures:
    """Features of a CPU.

    Attributes:
        features: any of ``avx2 avx512 avx512_vnni avx512_vbmi avx512_vpopcntdq avx_vnni amx_int8
            neon dotprod``; ``avx512`` includes F, BW, DQ and VL, ``avx2`` includes FMA.
        source: ``"cpuid"`` (of CPU and operating system), ``"/proc/cpuinfo"``, ``"platform"`` or
            ``"unknown"``.
    """

    features: frozenset[str]
    source: str

    def runs(self, level: InstructionSet) -> bool:
        """Whether kernels of `level` run here."""
        return _REQUIRED[level] <= self.features

    @property
    def best(self) -> InstructionSet:
        """The highest level that runs here.

        The environment variable ``SLIPSTREAM_INSTRUCTION_SET`` lowers it (for tests and
        comparisons); a level that this CPU lacks is ignored, because its kernels would crash.

        Raises:
            UnknownNameError: the variable's value is not a level.
        """
        name = os.environ.get("SLIPSTREAM_INSTRUCTION_SET", "").strip().lower()
        if name:
            if name not in list(InstructionSet):
                raise UnknownNameError(
                    "instruction set",
                    name,
                    list(InstructionSet),
                    where="environment variable SLIPSTREAM_INSTRUCTION_SET",
                )
            if self.runs(InstructionSet(name)):
                return InstructionSet(name)
        return next(level for level in _BEST_FIRST if self.runs(level))

    @property
    def levels(self) -> list[InstructionSet]:
        """All levels that run here up to `best`, best first."""
        below = _BEST_FIRST[_BEST_FIRST.index(self.best) :]
        return [level for level in below if self.runs(level)]


# Features that each level requires, best first.
_REQUIRED = {
    InstructionSet.AMX: {"avx2", "amx_int8"},
    InstructionSet.AVX512: {"avx2", "avx512", "avx512_vnni", "avx512_vbmi", "avx512_vpopcntdq"},
    InstructionSet.AVX512VNNI: {"avx2", "avx512", "avx512_vnni"},
    InstructionSet.AVX512BW: {"avx2", "avx512"},
    InstructionSet.AVXVNNI: {"avx2", "avx_vnni"},
    InstructionSet.AVX2: {"avx2"},
    InstructionSet.NEON_DOTPROD: {"neon", "dotprod"},
    InstructionSet.NEON: {"neon"},
    InstructionSet.SCALAR: set[str](),
}
_BEST_FIRST = tuple(_REQUIRED)

# Required flags in /proc/cpuinfo for each feature, in the order of the bits of
# `slipstream_cpu_features` in engine.h.
_CPUINFO_FLAGS = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_vnni": {"avx512_vnni"},
    "avx512_vbmi": {"avx512vbmi"},
    "avx512_vpopcntdq": {"avx512_vpopcntdq"},
    "neon": {"asimd"},
    "dotprod": {"asimddp"},
    "avx_vnni": {"avx_vnni"},
    "amx_int8": {"amx_tile", "amx_int8"},
}
_KNOWN_BIT = 1 << 31


@functools.cache
def cpu_features() -> CpuFeatures:
    """Return the features of this CPU, determined once per process."""
    compiled = library()
    if compiled is not None:
        compiled.slipstream_cpu_features.restype = ctypes.c_uint32
        bits = int(compiled.slipstream_cpu_features())
        if bits & _KNOWN_BIT:
            named = enumerate(_CPUINFO_FLAGS)
            return CpuFeatures(frozenset(name for i, name in named if bits >> i & 1), "cpuid")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _from_platform(platform.system(), platform.machine())
    return CpuFeatures(features_in_cpuinfo(text.splitlines()), "/proc/cpuinfo")


def features_in_cpuinfo(lines: Iterable[str]) -> frozenset[str]:
    """Return the features that all CPUs in ``/proc/cpuinfo`` have (cores may differ)."""
    common: set[str] | None = None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
            common = flags if common is None else common & flags
    return frozenset(
        name for name, flags in _CPUINFO_FLAGS.items() if common is not None and flags <= common
    )


def _from_platform(system: str, machine: str) -> CpuFeatures:
    if system == "Darwin" and machine == "arm64":
        # Every Apple CPU that runs macOS has both.
        return CpuFeatures(frozenset({"neon", "dotprod"}), "platform")
    return CpuFeatures(frozenset(), "unknown")
