"""From a network to a folder of firmware, and what it needs of a device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, UnknownNameError, UsageError
from slipstream.files import read_bytes
from slipstream.schema import build
from slipstream.ship.errors import DoesNotFitError, ModelFileError
from slipstream.ship.firmware import costs
from slipstream.ship.firmware.arena import Arena, plan_arena
from slipstream.ship.firmware.drawing import draw_arena
from slipstream.ship.firmware.emit_c import emit
from slipstream.ship.firmware.emit_interpreter import emit_interpreter
from slipstream.ship.firmware.interface import Interface, interface_of
from slipstream.ship.firmware.lowering import lower
from slipstream.ship.firmware.network import Network
from slipstream.ship.firmware.plan import missing_tables, planned_model
from slipstream.ship.firmware.planner import Buffer, greedy_plan
from slipstream.ship.firmware.program import Program
from slipstream.ship.firmware.targets import Target, target
from slipstream.ship.firmware.tflite import parse_network
from slipstream.tables import Field, Table
from slipstream.units import format_bytes

# What a plan with overlapping tensors would free is told only if it is so much.
_WORTH_BYTES = 256
BACKENDS = ("straight", "interpreter")
_DESCRIPTION, _MODEL, _FORMAT = "firmware.json", "model.tflite", 1


@dataclass(frozen=True)
class Firmware:
    """A network for a device, planned, not yet compiled.

    Attributes:
        model: the bytes of the .tflite file.
        arena: where tensors lie.
        target: the processor.
        backend: ``straight``: one call after another, everything a constant; ``interpreter``: the
            model stands in flash as a file, whose metadata holds the plan.
    """

    model: bytes = field(repr=False)
    program: Program
    arena: Arena
    target: Target
    backend: str = "straight"

    @property
    def network(self) -> Network:
        """The network it runs."""
        return self.program.network

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """C files by name."""
        if self.backend == "interpreter":
            return emit_interpreter(self.program, self.arena, self.model)
        return emit(self.program, self.arena)

    @cached_property
    def interface(self) -> Interface:
        """How it is called."""
        return interface_of(self.network, self.arena)

    @property
    def constant_bytes(self) -> int:
        """Weights, biases, multipliers and descriptions of steps in flash."""
        return costs.constant_bytes(self.program)

    def write(self, folder: Path) -> list[Path]:
        """Write C files, the model, its description and the drawing of its memory.

        Raises:
            UsageError: the folder holds something else, or cannot be written to.
        """
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        if taken and not (folder / _DESCRIPTION).is_file():
            raise UsageError(
                f"'{folder}' is not empty and holds no firmware of ours",
                remedy="name a new folder: -o firmware/",
            )
        described = _Description(
            _FORMAT, self.target.name, self.backend, self.interface, tuple(sorted(self.sources))
        )
        inputs = [self.network.tensors[index].name for index in self.network.inputs]
        texts = dict(self.sources) | {
            "memory.svg": draw_arena(
                self.arena, len(self.program.steps), self.network.name, inputs
            ),
            _DESCRIPTION: json.dumps(asdict(described), indent=1) + "\n",
        }
        # Kernels of the last export would be compiled with these.
        left_over: tuple[str, ...] = ()
        with suppress(ModelFileError):
            left_over = _description(folder).sources if taken else ()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in left_over:
                (folder / name).unlink(missing_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text, "utf-8")
            (folder / _MODEL).write_bytes(self.model)
        except OSError as error:
            raise UsageError(
                f"the firmware cannot be written: {error.strerror or error}",
                where=str(folder),
                remedy="name another folder: -o firmware/",
            ) from error
        return sorted(folder / name for name in (*texts, _MODEL))

    def to_json(self) -> dict[str, Any]:
        """What was exported and what it needs, for programs."""
        greedy = greedy_plan(self._plain_buffers())
        return {
            "model": self.network.name, "target": self.target.name, "backend": self.backend,
            "macs": self.program.macs,
            "arena_bytes": self.arena.size, "arena_bound_bytes": self.arena.plan.bound,
            "arena_optimal": self.arena.plan.optimal, "greedy_bytes": greedy.peak,
            "constant_bytes": self.constant_bytes, "interface": self.interface.to_json(),
            "steps": [
                {
                    "kernel": step.kernel, "macs": step.macs, "scratch_bytes": step.scratch,
                    "output": self.network.tensors[step.output].name,
                    "live_bytes": live,
                }
                for step, live in zip(self.program.steps, self.live_bytes(), strict=True)
            ],
        }  # fmt: skip

    def tables(self) -> list[Table]:
        """A row a step, and the sums."""
        network = self.network
        rows = list(enumerate(zip(self.program.steps, self.live_bytes(), strict=True)))
        fields: list[Field[Any]] = [
            Field.number("step", lambda row: row[0]),
            Field.of("kernel", lambda row: row[1][0].kernel.removeprefix("slip_")),
            Field.of("writes", lambda row: network.tensors[row[1][0].output].name, optional=True),
            Field.of(
                "shape", lambda row: "x".join(map(str, network.tensors[row[1][0].output].shape[1:]))
            ),
            Field.number("MACs", lambda row: f"{row[1][0].macs:,}"),
            Field.number("RAM in use", lambda row: format_bytes(row[1][1])),
        ]
        proof = "proved least" if self.arena.plan.optimal else "the best found"
        notes = [
            f"arena: {self.arena.size:,} B, {proof}; constants in flash: {self.constant_bytes:,} B",
            f"{self.program.macs:,} MACs (multiplications that are added up)",
        ]
        if self.backend == "interpreter":
            copied = sum(map(len, missing_tables(self.program)))
            notes.append(
                f"the plan in the model holds {copied:,} B of tables that the model lacks: "
                "rescaling, biases, and weights whose rows are no multiple of four"
            )
        return [Table.of(rows, fields, f"{network.name} for {self.target.name}", notes)]

    def live_bytes(self) -> list[int]:
        """Bytes of the arena in use, a step; what lies on each other counts once."""
        return [_covered_bytes(self.arena, number) for number in range(len(self.program.steps))]

    def _plain_buffers(self) -> list[Buffer]:
        return [Buffer(one.size, one.first, one.last) for one in self.arena.regions]


def _covered_bytes(arena: Arena, step: int) -> int:
    spans = sorted(
        (one.offset, one.offset + one.size)
        for one in arena.regions
        if one.first <= step <= one.last
    )
    covered = end = 0
    for start, stop in spans:
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return covered


def export_firmware(
    model: Path | str | bytes, *, name: str | None = None, device: str = "cortex-m4",
    ram_bytes: int | None = None, flash_bytes: int | None = None, overlap: bool = True,
    backend: str = "straight",
) -> Firmware:  # fmt: skip
    """Plan the firmware of a .tflite model.

    Args:
        model: a file, or its bytes.
        name: of the model; the file's by default.
        device: name of a `Target`.
        ram_bytes, flash_bytes: what the device has; None: as much as is needed.
        overlap: tensors may share memory while an operator reads one and writes the other.
        backend: see `Firmware`.

    Raises:
        UnknownNameError: there is no such device or back end.
        ModelFileError, UnsupportedModelError: see `parse_network` and `lower`.
        DoesNotFitError: the device has less memory.
    """
    if isinstance(model, bytes):
        data, where = model, None
    else:
        data, where = read_bytes(Path(model), ModelFileError), str(model)
        name = name or Path(model).stem
    chosen = target(device)
    network = parse_network(data, name or "model", where=where)
    if backend not in BACKENDS:
        raise UnknownNameError("back end", backend, BACKENDS)
    packed = backend == "straight" and not chosen.vectors
    program = lower(network, packed=packed, vectors=chosen.vectors)
    arena = plan_arena(program, overlap=overlap)
    if backend == "interpreter":
        data = planned_model(program, arena, vectors=chosen.vectors)
    firmware = Firmware(data, program, arena, chosen, backend)
    _check_fit(firmware, ram_bytes, flash_bytes)
    return firmware


@dataclass(frozen=True)
class Shortage:
    """Memory that a device has too little of.

    Attributes:
        kind: ``RAM`` or ``flash``.
        needed, missing: bytes.
        where: the operator that needs most.
        remedy: what would make it fit.
    """

    kind: str
    needed: int
    missing: int
    where: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.amounts}; {self.where}: {self.remedy}"

    @property
    def amounts(self) -> str:
        """What is needed and what the device has, in words."""
        return (
            f"{self.kind}: {self.needed:,} B are needed, the device has "
            f"{self.needed - self.missing:,} B, {self.missing:,} B too few"
        )


def shortages(made: Firmware, ram_bytes: int | None, flash_bytes: int | None) -> list[Shortage]:
    """What does not fit into limits; None where one is not asked for.

    Stack and code count where they are known: of straight C for processors that are measured.
    """
    program, network = made.program, made.network
    known = made.backend == "straight" and costs.fitted(made.target)
    ram = made.arena.size + (costs.stack_bytes(program, made.target) if known else 0)
    code = costs.code_bytes(program, made.target) if known else 0
    flash = made.constant_bytes + code
    short = []
    if ram_bytes is not None and ram > ram_bytes:
        live = made.live_bytes()
        fullest = program.steps[live.index(max(live))]
        remedy = "most is in use there: fewer channels or a smaller image"
        smaller = plan_arena(program).size
        if smaller + _WORTH_BYTES < made.arena.size:
            remedy += f"; or --overlap: {made.arena.size - smaller:,} B less"
        short.append(Shortage("RAM", ram, ram - ram_bytes, network.where(fullest.operator), remedy))
    if flash_bytes is not None and flash > flash_bytes:
        sizes = [sum(table.nbytes for table in step.tables.values()) for step in program.steps]
        largest = program.steps[sizes.index(max(sizes))]
        remedy = f"the most constants, {max(sizes):,} B, are there: fewer channels"
        if code >= flash_bytes:
            remedy = f"code alone is {code:,} B: fewer kinds of operators"
        short.append(
            Shortage("flash", flash, flash - flash_bytes, network.where(largest.operator), remedy)
        )
    return short


def _check_fit(made: Firmware, ram_bytes: int | None, flash_bytes: int | None) -> None:
    if short := shortages(made, ram_bytes, flash_bytes):
        raise DoesNotFitError(
            "it does not fit: " + "; ".join(shortage.amounts for shortage in short),
            missing_bytes=short[0].missing, where=short[0].where, remedy=short[0].remedy,
        )  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """A folder that `Firmware.write` made, as it is now.

    Attributes:
        sources: C files by name.
    """

    model: bytes = field(repr=False)
    interface: Interface
    target: Target
    sources: Mapping[str, str] = field(repr=False)


def read_firmware(folder: Path) -> Exported:
    """What stands in a folder of firmware.

    Raises:
        UsageError: it holds none.
        ModelFileError: its description is damaged, or a file is missing.
    """
    if not (folder / _DESCRIPTION).is_file():
        raise UsageError(
            f"'{folder}' holds no firmware", remedy=f"slipstream ship export MODEL -o {folder}"
        )
    described = _description(folder)
    try:
        sources = {name: (folder / name).read_text("utf-8") for name in described.sources}
        model = (folder / _MODEL).read_bytes()
    except (OSError, ValueError) as error:
        raise _incomplete(folder, error) from error
    return Exported(model, described.interface, target(described.target), sources)


@dataclass(frozen=True)
class _Description:
    """What stands in a folder of firmware, as its file has it."""

    format: int
    target: str
    backend: str
    interface: Interface
    sources: tuple[str, ...]


def _description(folder: Path) -> _Description:
    try:
        text = (folder / _DESCRIPTION).read_text("utf-8")
        described = build(_Description, json.loads(text), "", "firmware", {})
        described.interface.check()
        target(described.target)
        if any("/" in name or name.startswith(".") for name in described.sources):
            raise ValueError("a source outside of the folder")
    except (OSError, ValueError, SlipstreamError) as error:
        raise _incomplete(folder, error) from error
    return described


def _incomplete(folder: Path, error: Exception) -> ModelFileError:
    return ModelFileError(
        f"the firmware is not complete: {error}",
        where=str(folder),
        remedy=f"slipstream ship export MODEL -o {folder}",
    )
