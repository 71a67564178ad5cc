"""Plan, write and read firmware, and check that it fits a device."""

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
from slipstream.ship.firmware.plan import missing_tables, model_with_plan
from slipstream.ship.firmware.planner import Buffer, greedy_plan
from slipstream.ship.firmware.program import Program
from slipstream.ship.firmware.targets import Target, target
from slipstream.ship.firmware.tflite import parse_network
from slipstream.tables import Field, Table
from slipstream.units import format_bytes

# Smallest saving of overlapping tensors that a remedy mentions.
_MIN_SAVING_BYTES = 256
BACKENDS = ("straight", "interpreter")
_DESCRIPTION, _MODEL, _FORMAT = "firmware.json", "model.tflite", 1


@dataclass(frozen=True)
class Firmware:
    """A network planned for a device, not yet compiled.

    Attributes:
        model: contents of the .tflite file.
        arena: offsets of tensors.
        target: the processor.
        backend: ``straight``: a sequence of calls, with constants only; ``interpreter``: the model
            is in flash as a file, whose metadata holds the plan.
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
        """Arguments and result of its entry point."""
        return interface_of(self.network, self.arena)

    @property
    def constant_bytes(self) -> int:
        """Bytes of weights, biases, multipliers and step descriptions in flash."""
        return costs.constant_bytes(self.program)

    def write(self, folder: Path) -> list[Path]:
        """Write C files, the model, its description and a drawing of its memory.

        Raises:
            UsageError: the folder holds something else or cannot be written.
        """
        exists = need_folder(folder)
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
        # Remove kernels of an earlier export, which would be compiled with these.
        stale: tuple[str, ...] = ()
        with suppress(ModelFileError):
            stale = _description(folder).sources if exists else ()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in stale:
                (folder / name).unlink(missing_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text, "utf-8")
            (folder / _MODEL).write_bytes(self.model)
        except OSError as error:
            raise UsageError(
                f"cannot write the firmware: {error.strerror or error}",
                where=str(folder),
                remedy="pass another folder: -o firmware/",
            ) from error
        return sorted(folder / name for name in (*texts, _MODEL))

    def to_json(self) -> dict[str, Any]:
        """Return the model, its memory and its steps."""
        greedy = greedy_plan([Buffer(r.size, r.first, r.last) for r in self.arena.regions])
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
        """Return a table with a row per step, and the totals."""
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
        proof = "optimal" if self.arena.plan.optimal else "best found"
        notes = [
            f"arena: {self.arena.size:,} B, {proof}; constants in flash: {self.constant_bytes:,} B",
            f"{self.program.macs:,} MACs (multiply-accumulate operations)",
        ]
        if self.backend == "interpreter":
            copied = sum(map(len, missing_tables(self.program)))
            notes.append(
                f"the model's plan holds {copied:,} B of tables that the model lacks: "
                "rescaling, biases, and weights whose rows are not a multiple of four"
            )
        return [Table.of(rows, fields, f"{network.name} for {self.target.name}", notes)]

    def live_bytes(self) -> list[int]:
        """Return bytes of the arena in use per step; overlapping bytes count once."""
        return [_covered_bytes(self.arena, number) for number in range(len(self.program.steps))]


def _covered_bytes(arena: Arena, step: int) -> int:
    spans = sorted(
        (region.offset, region.offset + region.size)
        for region in arena.regions
        if region.first <= step <= region.last
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
        model: a file, or its contents.
        name: name of the model; that of the file by default.
        device: name of a `Target`.
        ram_bytes, flash_bytes: memory of the device; None for no limit.
        overlap: whether an operator's input and output may share memory.
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
        data = model_with_plan(program, arena, vectors=chosen.vectors)
    firmware = Firmware(data, program, arena, chosen, backend)
    _check_fit(firmware, ram_bytes, flash_bytes)
    return firmware


@dataclass(frozen=True)
class Shortage:
    """Memory that a device lacks.

    Attributes:
        kind: ``RAM`` or ``flash``.
        needed, missing: bytes.
        where: the operator that needs most.
        remedy: change that reduces the need.
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
        """Needed and available memory, as text."""
        return (
            f"{self.kind}: {self.needed:,} B are required, but the device has "
            f"{self.needed - self.missing:,} B: {self.missing:,} B are missing"
        )


def shortages(firmware: Firmware, ram_bytes: int | None, flash_bytes: int | None) -> list[Shortage]:
    """Return the memory limits that firmware exceeds; a limit of None does not apply.

    Stack and code count if they are known: for straight C on measured processors.
    """
    program, network = firmware.program, firmware.network
    measured = firmware.backend == "straight" and costs.fitted(firmware.target)
    ram = firmware.arena.size + (costs.stack_bytes(program, firmware.target) if measured else 0)
    code = costs.code_bytes(program, firmware.target) if measured else 0
    flash = firmware.constant_bytes + code
    missing = []
    if ram_bytes is not None and ram > ram_bytes:
        live = firmware.live_bytes()
        fullest = program.steps[live.index(max(live))]
        remedy = "reduce channels or the image size there, where most memory is in use"
        smaller = plan_arena(program).size
        if smaller + _MIN_SAVING_BYTES < firmware.arena.size:
            remedy += f"; or pass --overlap, which saves {firmware.arena.size - smaller:,} B"
        missing.append(
            Shortage("RAM", ram, ram - ram_bytes, network.where(fullest.operator), remedy)
        )
    if flash_bytes is not None and flash > flash_bytes:
        sizes = [sum(table.nbytes for table in step.tables.values()) for step in program.steps]
        largest = program.steps[sizes.index(max(sizes))]
        remedy = f"reduce channels there, where most constants are: {max(sizes):,} B"
        if code >= flash_bytes:
            remedy = f"use fewer kinds of operators: code alone is {code:,} B"
        missing.append(
            Shortage("flash", flash, flash - flash_bytes, network.where(largest.operator), remedy)
        )
    return missing


def _check_fit(firmware: Firmware, ram_bytes: int | None, flash_bytes: int | None) -> None:
    if missing := shortages(firmware, ram_bytes, flash_bytes):
        raise DoesNotFitError(
            "the firmware does not fit: " + "; ".join(shortage.amounts for shortage in missing),
            missing_bytes=missing[0].missing, where=missing[0].where, remedy=missing[0].remedy,
        )  # fmt: skip


def need_folder(folder: Path) -> bool:
    """Check that firmware can be written to `folder`; return whether it has files.

    Raises:
        UsageError: it is a file, or holds something else than firmware.
    """
    exists = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if exists and not (folder / _DESCRIPTION).is_file():
        raise UsageError(
            f"'{folder}' is not empty and does not hold firmware",
            remedy="pass a new folder: -o firmware/",
        )
    return exists


@dataclass(frozen=True)
class FirmwareFolder:
    """A folder that `Firmware.write` made, with its current contents.

    Attributes:
        sources: C files by name.
    """

    model: bytes = field(repr=False)
    interface: Interface
    target: Target
    sources: Mapping[str, str] = field(repr=False)


def read_firmware(folder: Path) -> FirmwareFolder:
    """Read a folder of firmware.

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
    return FirmwareFolder(model, described.interface, target(described.target), sources)


@dataclass(frozen=True)
class _Description:
    """Contents of ``firmware.json``."""

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
        f"the firmware is incomplete: {error}",
        where=str(folder),
        remedy=f"slipstream ship export MODEL -o {folder}",
    )
