"""Scaling of a kernel's duration from one GPU to another.

Waves of thread blocks are bound by memory to the share gamma and by arithmetic to the rest; gamma
follows from the roofline.

Source: Yu, Gao, Golikov and Pekhimenko, "Habitat: A runtime-based computational performance
predictor for deep neural network training", USENIX ATC 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MAX_BLOCKS = 32
_WARP = 32
_REGISTER_GRANULARITY = 256


@dataclass(frozen=True)
class Gpu:
    """Properties of a device that scaling uses.

    Attributes:
        bytes_per_s: memory bandwidth.
        clock_hz: of the multiprocessors.
        multiprocessors: their number.
        threads, registers, shared_bytes: per multiprocessor.
        flops_per_s: peaks by dtype, named as in data sheets.
    """

    bytes_per_s: float
    clock_hz: float
    multiprocessors: int
    threads: int
    registers: int
    shared_bytes: int
    flops_per_s: dict[str, float]


@dataclass(frozen=True)
class Launch:
    """Number of blocks of a kernel launch, and the resources of each."""

    blocks: int
    threads: int
    registers_per_thread: int = 0
    shared_bytes: int = 0

    def blocks_at_once(self, gpu: Gpu) -> int:
        """Return the blocks of a wave, limited by threads, registers and shared memory."""
        warps = -(-self.threads // _WARP)
        fit = [_MAX_BLOCKS, gpu.threads // max(warps * _WARP, 1)]
        if self.registers_per_thread:
            # Registers are allocated per warp at this granularity.
            portion = -(-self.registers_per_thread * _WARP // _REGISTER_GRANULARITY)
            fit.append(gpu.registers // max(portion * _REGISTER_GRANULARITY * warps, 1))
        if self.shared_bytes:
            fit.append(gpu.shared_bytes // self.shared_bytes)
        return max(min(fit), 1) * gpu.multiprocessors


def gamma(flops: float, nbytes: float, peak_flops_per_s: float, bytes_per_s: float) -> float:
    """Return the memory-bound share of a kernel on a device with these limits, from 0 to 1.

    With arithmetic intensity I and the device's ridge point R it is ``1 - 0.5 I / R`` below the
    ridge and ``0.5 R / I`` above it; 1 without arithmetic, 0 without memory traffic.
    """
    if flops <= 0:
        return 1.0
    if nbytes <= 0:
        return 0.0
    intensity, ridge = flops / nbytes, peak_flops_per_s / bytes_per_s
    return 1 - 0.5 * intensity / ridge if intensity <= ridge else 0.5 * ridge / intensity


def wave_scaled(origin: Gpu, other: Gpu, launch: Launch | None, share: float) -> float:
    """Return the duration of a kernel on `other` relative to `origin`.

    Args:
        launch: None if the trace lacks it; the kernel is then assumed to fill both devices.
        share: `gamma`.
    """
    clock = origin.clock_hz / other.clock_hz
    if launch is not None and all(
        launch.blocks < launch.blocks_at_once(gpu) for gpu in (origin, other)
    ):
        # Less than one wave on either: further multiprocessors and bandwidth would be idle.
        rounds = [math.ceil(launch.blocks / gpu.multiprocessors) for gpu in (other, origin)]
        return float((clock * rounds[0] / rounds[1]) ** (1 - share))
    memory = origin.bytes_per_s / other.bytes_per_s
    units = origin.multiprocessors / other.multiprocessors
    return float(memory**share * (clock * units) ** (1 - share))
