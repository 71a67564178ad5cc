"""Accelerators that skip zeros: their hardware, and spaces of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._options import Json

if TYPE_CHECKING:
    from slipstream.hardware.space import Sweep
    from slipstream.tables import Field

app = typer.Typer(
    no_args_is_help=True,
    help="Generate and check the scheduler of an accelerator that skips zeros; search its sizes.",
    epilog="Simulate a recorded step on one: slipstream predict run.slipgraph --hw tensordash",
)

_Chip = Annotated[
    str, typer.Option("--hw", metavar="FILE.toml", help="A TOML description, or tensordash.")
]
_Vectors = Annotated[int, typer.Option(min=1, max=10_000_000, help="Number of test vectors.")]


@app.command()
def rtl(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Output folder.")],
    hw: _Chip = "tensordash",
    vectors: _Vectors = 10_000,
    as_json: Json = False,
) -> None:
    """Write the scheduler as Verilog, with test vectors and a Verilator test bench.

    slipstream hw rtl --out scheduler
    """
    from slipstream.cli._output import emit
    from slipstream.hardware import Accelerator
    from slipstream.hardware.rtl import write_rtl
    from slipstream.tables import Column, Table

    chip = Accelerator.load(hw)
    files = write_rtl(out, chip.frontend, chip.array.lanes, vectors)
    rows = [{"file": str(file), "bytes": file.stat().st_size} for file in files]
    table = Table(
        [Column("file"), Column("bytes", "right")], [list(row.values()) for row in rows],
        f"the scheduler of {chip.name}",
    )  # fmt: skip
    emit(table, rows, as_json=as_json)


@app.command()
def cosim(hw: _Chip = "tensordash", vectors: _Vectors = 1_000_000, as_json: Json = False) -> None:
    """Compare the Verilog with the simulated scheduler, by Verilator.

    slipstream hw cosim --vectors 100000
    """
    from slipstream.cli._output import emit, progress
    from slipstream.hardware import Accelerator
    from slipstream.hardware.rtl import cosimulate
    from slipstream.tables import Column, Table

    chip = Accelerator.load(hw)
    with progress(f"compiling the scheduler of {chip.name}"):
        mismatches = cosimulate(chip.frontend, chip.array.lanes, vectors)
    counts = {"vectors": vectors, "mismatches": mismatches}
    table = Table(
        [Column(name, "right") for name in counts], [[f"{n:,}" for n in counts.values()]],
        f"Verilog and model of {chip.name}",
    )  # fmt: skip
    emit(table, {"accelerator": chip.name, **counts}, as_json=as_json)
    if mismatches:
        raise typer.Exit(1)


@app.command()
def sweep(
    recording: Annotated[Path, typer.Argument(metavar="RUN.slipgraph", help="A recorded step.")],
    hw: _Chip = "tensordash",
    space: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help='Values by attribute, such as {"tiles": [4, 8]}.'),
    ] = None,
    zeros: Annotated[
        bool,
        typer.Option(
            "--zeros", help="Skip the recorded zeros, with the front end of --hw on every chip."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Predict the layers of a recorded step on every chip of a space.

    slipstream hw sweep run.slipgraph
    """
    from slipstream.cli._output import emit, progress
    from slipstream.graph import load
    from slipstream.hardware import Accelerator
    from slipstream.hardware.space import SPACE, sweep_space
    from slipstream.tables import Table

    graph, chip = load(recording), Accelerator.load(hw)
    values = SPACE if space is None else _space(space)
    with progress(f"chips like {chip.name}"):
        found = sweep_space(graph, chip, values, zeros=zeros)
    rows = found.fastest()
    payload = {
        "accelerator": chip.name,
        "chips": len(found.time_ns),
        "fastest": [
            {name: float(column[row]) for name, column in vars(found.chips).items()}
            | {"time_ns": float(found.time_ns[row]), "energy_pj": float(found.energy_pj[row])}
            for row in rows
        ],
    }
    note = f"chips predicted: {len(found.time_ns):,}; of each number of multipliers the fastest"
    title = f"layers of {recording.name} on chips like {chip.name}"
    emit(Table.of(rows, _fields(found), title, [note]), payload, as_json=as_json)


def _space(path: Path) -> Mapping[str, Sequence[float]]:
    from slipstream.errors import InvalidArgumentError
    from slipstream.files import read_bytes
    from slipstream.schema import read

    try:
        table = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError("--space", f"not JSON: {error}", where=str(path)) from error
    values: Mapping[str, Sequence[float]] = read(Mapping[str, Sequence[float]], table, "space", {})
    return values


def _fields(found: Sweep) -> list[Field[int]]:
    from slipstream.tables import Field
    from slipstream.units import format_bytes, format_duration

    chips = found.chips
    return [
        Field.number("multipliers", lambda row: f"{chips.macs[row]:,.0f}"),
        Field.number("tiles", lambda row: f"{chips.tiles[row]:.0f}"),
        Field.number("rows", lambda row: f"{chips.rows[row]:.0f}"),
        Field.number("columns", lambda row: f"{chips.columns[row]:.0f}"),
        Field.number("lanes", lambda row: f"{chips.lanes[row]:.0f}"),
        Field.number("clock", lambda row: f"{chips.clock_hz[row] / 1e6:.0f} MHz"),
        Field.number("on-chip", lambda row: format_bytes(chips.onchip_bytes[row])),
        Field.number("DRAM", lambda row: f"{format_bytes(chips.dram_bytes_per_s[row])}/s"),
        Field.number("time", lambda row: format_duration(float(found.time_ns[row]))),
        Field.number("energy", lambda row: f"{found.energy_pj[row] / 1e9:.3g} mJ"),
    ]
