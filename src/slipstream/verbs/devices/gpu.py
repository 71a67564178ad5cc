"""A recorded step's kernels on another GPU; see `slipstream.durations.wave_scaling`."""

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

# What multiplies matrices: its implementation differs from device to device (Habitat's
# "kernel-varying" operators), and tensor cores count for more than multiprocessors.
_MATRIX = re.compile(r"gemm|conv|cudnn|cutlass|winograd|wgrad|dgrad|fprop|[hs]mma|flash|fmha", re.I)
_HALF = re.compile(r"fp16|f16|half|h884|h1688|h16816|s884|s16816", re.I)
_BRAIN = re.compile(r"bf16|bfloat16", re.I)
_TENSOR32 = re.compile(r"tf32|s1688", re.I)
# Relative, as a standard deviation: the average error of Habitat's predictions on six GPUs.
_LEAST_SPREAD = 0.118
_Z90 = 1.645


def scale_kernels(graph: Graph, origin: Device, other: Device) -> Graph | str:
    """`graph` with its kernels as they would run on `other`, or why that cannot be told.

    Without counters the share that memory bounds is not known. It is taken to be all of a kernel
    that multiplies no matrices; of one that does, half, and the interval reaches from none to all.
    """
    gpus = [_gpu(one) for one in (origin, other)]
    if gpus[0] is None or gpus[1] is None:
        lacking = origin if gpus[0] is None else other
        return f"the data sheet of {lacking.kind} here has no multiprocessors and clock"
    here, there = gpus[0], gpus[1]
    edit = Editor(graph, other.kind)
    changes: list[tuple[int, float, float]] = []
    if origin.kind != other.kind:
        for task, name, launch in _kernels(graph):
            ratio, spread = _ratio(name, launch, here, there)
            changes.append((task, ratio, spread))
    total = sum(float(graph.tasks.duration_ns[task]) for task, _, _ in changes)
    weighted = sum(float(graph.tasks.duration_ns[task]) * spread for task, _, spread in changes)
    # One data sheet is wrong about all of them alike.
    common = common_spread(graph, [task for task, _, _ in changes], weighted / max(total, 1.0))
    for task, ratio, _ in changes:
        edit.scale(task, ratio, Provenance.DATASHEET, spread=common)
    return edit.apply(f"{len(changes)} kernels on {other.kind}")


def _ratio(name: str, launch: Launch | None, here: Gpu, there: Gpu) -> tuple[float, float]:
    """How many times as long, and how sure that is."""
    memory = wave_scaled(here, there, launch, 1.0)
    if not _MATRIX.search(name):
        return memory, _LEAST_SPREAD
    rates = [_rate(name, gpu) for gpu in (here, there)]
    compute = wave_scaled(here, there, launch, 0.0)
    if rates[0] and rates[1] and not _smaller_than_a_wave(launch, here, there):
        compute = rates[0] / rates[1]
    spread = abs(math.log(memory / compute)) / 2 / _Z90
    return math.sqrt(memory * compute), math.hypot(spread, _LEAST_SPREAD)


def _smaller_than_a_wave(launch: Launch | None, here: Gpu, there: Gpu) -> bool:
    return launch is not None and all(
        launch.blocks < launch.blocks_at_once(gpu) for gpu in (here, there)
    )


def _rate(name: str, gpu: Gpu) -> float | None:
    """Peak of what the kernel's name says it computes with, or of what the device has for that."""
    wanted = ["fp32"]
    if _BRAIN.search(name):
        wanted = ["bf16", "fp32"]
    elif _TENSOR32.search(name) and not re.search("fp16|f16f16|h1688", name, re.I):
        wanted = ["tf32", "fp32"]
    elif _HALF.search(name):
        wanted = ["fp16", "fp32"]
    return next((gpu.flops_per_s[dtype] for dtype in wanted if dtype in gpu.flops_per_s), None)


def _kernels(graph: Graph) -> Iterator[tuple[int, str, Launch | None]]:
    """Tasks that compute, and how each was launched, where the recording kept that."""
    recorded = graph.meta.get("launches")
    shapes = recorded if isinstance(recorded, dict) else {}
    by_name: dict[str, list[int]] = defaultdict(list)
    for task, kind in enumerate(graph.tasks.kind.tolist()):
        if kind == Kind.KERNEL:
            by_name[graph.task(task).name].append(task)
    for name, tasks in by_name.items():
        rows = shapes.get(name, [])
        for number, task in enumerate(tasks):
            # An edit may have put in or taken away some: then the one in their middle stands in.
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
    values = [one.value for one in numbers if one is not None]
    if len(values) < len(numbers):
        return None
    bandwidth, clock, count, threads, registers, shared = values
    flops = {dtype: rate.value for dtype, rate in device.flops.items()}
    return Gpu(bandwidth, clock, int(count), int(threads), int(registers), int(shared), flops)
