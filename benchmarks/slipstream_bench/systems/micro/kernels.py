"""Rows of ``slipstream bench micro`` on kernels and plans: instructions per multiplication on
MobileNet's feature maps, and safety of overwriting unused memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from slipstream.data import MissingDataError
from slipstream.errors import MissingExtraError
from slipstream.ship import ToolchainError
from slipstream.ship.export import write_network
from slipstream.ship.firmware import (
    Firmware,
    export_firmware,
    random_inputs,
    run_emulated,
    run_here,
)
from slipstream.ship.firmware.network import Array
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.micro.fit import Shapes

# Channels, and the image size at which person_detect has them.
_MAPS = ((8, 48), (16, 48), (32, 24), (64, 12), (128, 6), (256, 3))
_DEEP = 64
_TOOLS = ("arm-none-eabi-gcc", "qemu-system-arm")
_SAFE = "memory overwritten where nothing lives: output bytes that change"


def kernel_bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield instructions per multiplication, including padding, on a Cortex-M4."""
    depthwise = "cortex-m4, depthwise 3x3, 8 to 256 channels: instructions a multiplication"
    deep = "cortex-m4, 1x1, 64 to 256 channels: instructions a multiplication"
    thin = "cortex-m4, 1x1, 8 channels: instructions a multiplication"
    if options.wants(depthwise, 30):
        options.progress(depthwise)
        yield _costs(depthwise, 4.5, list(_MAPS), lambda it, k: it.depthwise((3, 3), 1, 1, k))
    for bar, most, maps in (
        (deep, 1.7, [size for size in _MAPS if size[0] >= _DEEP]), (thin, 3.5, [_MAPS[0]]),
    ):  # fmt: skip
        if options.wants(bar, 20):
            options.progress(bar)
            yield _costs(bar, most, maps, lambda it, k: it.convolution((1, 1), 1, k, channels=k))


def _costs(
    bar: str, most: float, maps: list[tuple[int, int]], add: Callable[[Shapes, int], None]
) -> Bar:
    """Return the row of the most expensive map."""
    if missing := [tool for tool in _TOOLS if not shutil.which(tool)]:
        return not_judged(bar, "instructions", f"<= {most:g}", f"{missing[0]} is not installed")
    costs = {}
    for channels, side in maps:
        shapes = Shapes(0, side)
        add(shapes, channels)
        made = export_firmware(write_network(shapes.network([])))
        with tempfile.TemporaryDirectory() as folder:
            ran = run_emulated(
                made.sources, made.interface, random_inputs(made.interface, 1), Path(folder),
                made.target,
            )  # fmt: skip
        costs[f"{channels} at {side} x {side}"] = ran.instructions[0] / made.program.macs
    listed = ", ".join(f"{name}: {cost:.2f}" for name, cost in costs.items())
    return at_most(bar, max(costs.values()), most, "instructions", n=len(costs), detail=listed)


def safety_bars(
    options: BenchOptions, networks: Callable[[], Iterator[tuple[str, bytes]]]
) -> Iterator[Bar]:
    """Overwrite all unused bytes of the arena between steps; outputs must not change."""
    for device in ("cortex-m4", "cortex-m55"):
        bar = f"{device}: {_SAFE}"
        if not options.wants(bar, 60):
            continue
        options.progress(bar)
        changed, steps = {}, 0
        try:
            for name, model in networks():
                made = export_firmware(model, name=name, device=device)
                steps += len(made.program.steps)
                if count := changed_bytes(made):
                    changed[name] = count
        except (MissingDataError, MissingExtraError, ToolchainError) as error:
            yield not_judged(bar, "bytes", "<= 0", error.what)
            continue
        yield at_most(
            bar, sum(changed.values()), 0, "bytes", n=steps,
            detail="steps of all networks, emulated" + (f"; {changed}" if changed else ""),
        )  # fmt: skip


def changed_bytes(made: Firmware, *, emulate: bool = True) -> int:
    """Return the number of output bytes that depend on unused memory, for two patterns."""
    inputs = random_inputs(made.interface, 1)
    expected, *others = (
        _outputs(made, sources, inputs, emulate)
        for sources in (made.sources, overwriting(made, 0x5A), overwriting(made, 0xA5))
    )
    return sum(
        int((a != b).sum()) for other in others for a, b in zip(expected, other, strict=True)
    )


def _outputs(
    made: Firmware, sources: Mapping[str, str], inputs: list[list[Array]], emulate: bool
) -> list[Array]:
    with tempfile.TemporaryDirectory() as folder:
        if emulate:
            ran = run_emulated(sources, made.interface, inputs, Path(folder), made.target)
        else:
            ran = run_here(sources, made.interface, inputs, Path(folder))
    return ran.outputs[0]


def overwriting(made: Firmware, pattern: int) -> dict[str, str]:
    """Return sources that write `pattern` over unused memory before each step and at the end."""
    sources = dict(made.sources)
    model = sources["model.c"]
    for step in range(len(made.program.steps) + 1):
        fills = "".join(
            f" memset((char *)arena + {start}, {pattern}, {end - start});"
            for start, end in unused(made, step)
        )
        mark = f"SLIP_STEP({step})"
        model = model.replace(f"  {mark}", f"  {mark}{fills}")
    sources["model.c"] = "#include <string.h>\n" + model
    return sources


def unused(made: Firmware, step: int) -> Iterator[tuple[int, int]]:
    """Yield spans of the arena that neither `step` nor a later one reads, including the outputs of
    `step` until it has run."""
    arena, network = made.arena, made.network
    ports = network.outputs if step == len(made.program.steps) else network.inputs
    needed = [(arena.tensors[index], network.tensors[index].nbytes) for index in ports]
    if 0 < step < len(made.program.steps):
        needed = [
            (region.offset, region.size)
            for region in arena.regions
            if region.first < step <= region.last
        ]
    end = 0
    for offset, size in sorted(needed):
        if offset > end:
            yield end, offset
        end = max(end, offset + size)
    if end < arena.size:
        yield end, arena.size
