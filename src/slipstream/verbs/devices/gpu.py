"""Predict a recorded step's kernels on another GPU; see `slipstream.durations.wave_scaling`."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator

from slipstream.cluster.devices import Device
from slipstream.durations import common_spread
from slipstream.durations.wave_scaling import Gpu, Launch, wave_scaled
from slipstream.graph import Editor, Graph, Kind
from slipstream.provenance import Provenance

# Matrix kernels: their implementation differs between devices (Habitat's "kernel-varying"
# operators), and tensor cores matter more than multiprocessors.
_MATRIX = re.compile(r"gemm|conv|cudnn|cutlass|winograd|wgrad|dgrad|fprop|[hs]mma|flash|fmha", re.I)
_HALF = re.compile(r"fp16|f16|half|h884|h1688|h16816|s884|s16816", re.I)
_BRAIN = re.compile(r"bf16|bfloat16", re.I)
_TENSOR32 = re.compile(r"tf32|s1688", re.I)
# Relative standard deviation: the average error of Habitat's predictions on six GPUs.
_MIN_SPREAD = 0.118
_Z90 = 1.645


def scale_kernels(graph: Graph, origin: Device, other: Device) -> Graph | str:
    """Return `graph` with its kernels as they would run on `other`, or a reason why not.

    Without counters the memory-bound share of a kernel is unknown. It is assumed to be all of a
    kernel that multiplies no matrices; for one that does, half, with an interval from none to all.
    """
    gpus = [_gpu(device) for device in (origin, other)]
    if gpus[0] is None or gpus[1] is None:
        incomplete = origin if gpus[0] is None else other
        return f"the data sheet of {incomplete.kind} here has no multiprocessors and clock"
    source, target = gpus[0], gpus[1]
    edit = Editor(graph, other.kind)
    changes: list[tuple[int, float, float]] = []
    if origin.kind != other.kind:
        for task, name, launch in _kernels(graph):
            ratio, spread = _ratio(name, launch, source, target)
            changes.append((task, ratio, spread))
    total = sum(float(graph.tasks.duration_ns[task]) for task, _, _ in changes)
    weighted = sum(float(graph.tasks.duration_ns[task]) * spread for task, _, spread in changes)
    # An error of the data sheet affects all kernels.
    common = common_spread(graph, [task for task, _, _ in changes], weighted / max(total, 1.0))
    for task, ratio, _ in changes:
        edit.scale(task, ratio, Provenance.DATASHEET, spread=common)
    return edit.apply(f"{len(changes)} kernels on {other.kind}")


def _ratio(name: str, launch: Launch | None, source: Gpu, target: Gpu) -> tuple[float, float]:
    memory = wave_scaled(source, target, launch, 1.0)
    if not _MATRIX.search(name):
        return memory, _MIN_SPREAD
    rates = [_rate(name, gpu) for gpu in (source, target)]
    compute = wave_scaled(source, target, launch, 0.0)
    if rates[0] and rates[1] and not _smaller_than_a_wave(launch, source, target):
        compute = rates[0] / rates[1]
    spread = abs(math.log(memory / compute)) / 2 / _Z90
    return math.sqrt(memory * compute), math.hypot(spread, _MIN_SPREAD)


def _smaller_than_a_wave(launch: Launch | None, source: Gpu, target: Gpu) -> bool:
    return launch is not None and all(
        launch.blocks < launch.blocks_at_once(gpu) for gpu in (source, target)
    )


def _rate(name: str, gpu: Gpu) -> float | None:
    """Return the device's peak rate for the data type in the kernel's name, or for float32."""
    dtypes = ["fp32"]
    if _BRAIN.search(name):
        dtypes = ["bf16", "fp32"]
    elif _TENSOR32.search(name) and not re.search("fp16|f16f16|h1688", name, re.I):
        dtypes = ["tf32", "fp32"]
    elif _HALF.search(name):
        dtypes = ["fp16", "fp32"]
    return next((gpu.flops_per_s[dtype] for dtype in dtypes if dtype in gpu.flops_per_s), None)


def _kernels(graph: Graph) -> Iterator[tuple[int, str, Launch | None]]:
    """Yield compute kernels with their launch shape, if recorded."""
    recorded = graph.meta.get("launches")
    shapes = recorded if isinstance(recorded, dict) else {}
    by_name: dict[str, list[int]] = defaultdict(list)
    for task, kind in enumerate(graph.tasks.kind.tolist()):
        if kind == Kind.KERNEL:
            by_name[graph.task(task).name].append(task)
    for name, tasks in by_name.items():
        rows = shapes.get(name, [])
        for number, task in enumerate(tasks):
            # If an edit added or removed kernels, use the median launch.
            if rows:
                row = rows[number] if len(rows) == len(tasks) else sorted(rows)[len(rows) // 2]
                yield task, name, Launch(*row)
            else:
                yield task, name, None


def _gpu(device: Device) -> Gpu | None:
    numbers = [
        device.memory_bytes_per_s, device.clock_hz, device.multiprocessors, device.threads_each,
        device.registers_each, device.shared_bytes_each,
    ]  # fmt: skip
    values = [quantity.value for quantity in numbers if quantity is not None]
    if len(values) < len(numbers):
        return None
    bandwidth, clock, count, threads, registers, shared = values
    flops = {dtype: rate.value for dtype, rate in device.flops.items()}
    return Gpu(bandwidth, clock, int(count), int(threads), int(registers), int(shared), flops)
