"""A kernel's time on another GPU, from its time on one and what both are.

Source: Yu, Gao, Golikov and Pekhimenko, "Habitat: A runtime-based computational performance
predictor for deep neural network training", USENIX ATC 2021: waves of thread blocks are bound by
memory to the share gamma and by arithmetic to the rest; gamma is read off the roofline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MOST_BLOCKS = 32
_WARP = 32
_REGISTERS_AT_ONCE = 256


@dataclass(frozen=True)
class Gpu:
    """What scaling takes of a device.

    Attributes:
        bytes_per_s: of its memory.
        clock_hz: of its multiprocessors.
        multiprocessors: how many there are.
        threads, registers, shared_bytes: of one multiprocessor.
        flops_per_s: peaks by dtype, as data sheets call them.
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
    """How a kernel was launched: blocks, and what each of them takes."""

    blocks: int
    threads: int
    registers_per_thread: int = 0
    shared_bytes: int = 0

    def blocks_at_once(self, gpu: Gpu) -> int:
        """A wave: as many blocks as all multiprocessors hold, by threads, registers and memory."""
        warps = -(-self.threads // _WARP)
        fit = [_MOST_BLOCKS, gpu.threads // max(warps * _WARP, 1)]
        if self.registers_per_thread:
            # Handed out to each warp in such portions.
            portion = -(-self.registers_per_thread * _WARP // _REGISTERS_AT_ONCE)
            fit.append(gpu.registers // max(portion * _REGISTERS_AT_ONCE * warps, 1))
        if self.shared_bytes:
            fit.append(gpu.shared_bytes // self.shared_bytes)
        return max(min(fit), 1) * gpu.multiprocessors


def gamma(flops: float, nbytes: float, peak_flops_per_s: float, bytes_per_s: float) -> float:
    """The share of a kernel that memory bounds, on a device of these limits: 0 to 1.

    From its arithmetic intensity I and the device's ridge point R: ``1 - 0.5 I / R`` below the
    ridge, ``0.5 R / I`` above it; 1 without arithmetic, 0 without memory traffic.
    """
    if flops <= 0:
        return 1.0
    if nbytes <= 0:
        return 0.0
    intensity, ridge = flops / nbytes, peak_flops_per_s / bytes_per_s
    return 1 - 0.5 * intensity / ridge if intensity <= ridge else 0.5 * ridge / intensity


def wave_scaled(origin: Gpu, other: Gpu, launch: Launch | None, share: float) -> float:
    """How many times as long a kernel takes on `other` as on `origin`.

    Args:
        launch: None where the trace does not tell; then it is taken to fill both devices.
        share: `gamma`.
    """
    clock = origin.clock_hz / other.clock_hz
    if launch is not None and all(
        launch.blocks < launch.blocks_at_once(gpu) for gpu in (origin, other)
    ):
        # Less than one wave on either: more multiprocessors or bandwidth would stand idle.
        rounds = [math.ceil(launch.blocks / gpu.multiprocessors) for gpu in (other, origin)]
        return float((clock * rounds[0] / rounds[1]) ** (1 - share))
    memory = origin.bytes_per_s / other.bytes_per_s
    units = origin.multiprocessors / other.multiprocessors
    return float(memory**share * (clock * units) ** (1 - share))
