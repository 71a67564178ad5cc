"""Which instruction sets this processor can run, for choosing kernels and for ``doctor``."""

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
    """Levels a kernel may be written for."""

    SCALAR = "scalar"
    AVX2 = "avx2"
    """x86-64 with AVX2 and FMA."""
    AVXVNNI = "avxvnni"
    """AVX2 and the int8 dot product on 256 bits: client processors from Alder Lake on."""
    AVX512BW = "avx512bw"
    """AVX-512 F, BW, DQ and VL: Skylake-SP and later."""
    AVX512VNNI = "avx512vnni"
    """Those and VNNI: Cascade Lake, Cooper Lake and later."""
    AVX512 = "avx512"
    """AVX-512 F, BW, DQ, VL, VNNI, VBMI and VPOPCNTDQ: Ice Lake, Zen 4 and later."""
    AMX = "amx"
    """x86-64 with tiles of bytes: Sapphire Rapids and later."""
    NEON = "neon"
    NEON_DOTPROD = "neon_dotprod"
    """AArch64 with the int8 dot product (Armv8.2)."""


@dataclass(frozen=True)
class CpuFeatures:
    """What was found.

    Attributes:
        features: any of ``avx2 avx512 avx512_vnni avx512_vbmi avx512_vpopcntdq avx_vnni amx_int8
            neon dotprod``; ``avx512`` stands for F, BW, DQ and VL together, ``avx2`` includes FMA.
        source: ``"cpuid"`` (asked the processor and the operating system), ``"/proc/cpuinfo"``,
            ``"platform"`` or ``"unknown"``.
    """

    features: frozenset[str]
    source: str

    def runs(self, level: InstructionSet) -> bool:
        """Whether kernels of `level` can run here."""
        return _REQUIRED[level] <= self.features

    @property
    def best(self) -> InstructionSet:
        """The highest level that can run here.

        ``SLIPSTREAM_INSTRUCTION_SET`` in the environment lowers it (for tests and comparisons); a
        level this processor lacks is ignored, because honouring it would crash.

        Raises:
            UnknownNameError: the environment names no level.
        """
        wanted = os.environ.get("SLIPSTREAM_INSTRUCTION_SET", "").strip().lower()
        if wanted:
            if wanted not in list(InstructionSet):
                raise UnknownNameError(
                    "instruction set",
                    wanted,
                    list(InstructionSet),
                    where="environment variable SLIPSTREAM_INSTRUCTION_SET",
                )
            if self.runs(InstructionSet(wanted)):
                return InstructionSet(wanted)
        return next(level for level in _BEST_FIRST if self.runs(level))

    @property
    def levels(self) -> list[InstructionSet]:
        """`best` and what else can run here below it, best first."""
        below = _BEST_FIRST[_BEST_FIRST.index(self.best) :]
        return [level for level in below if self.runs(level)]


# What each level needs, best first.
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

# What each feature is called in the flags of /proc/cpuinfo, where all must be there; in the order
# of the bits of `slipstream_cpu_features` in engine.h.
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
    """The features of this processor, asked once per process."""
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
    """Features every processor listed in ``/proc/cpuinfo`` has (cores may differ)."""
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
        # Every Apple processor that runs macOS has both.
        return CpuFeatures(frozenset({"neon", "dotprod"}), "platform")
    return CpuFeatures(frozenset(), "unknown")
