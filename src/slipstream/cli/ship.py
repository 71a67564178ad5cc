"""Convert a trained model to firmware for a microcontroller and verify it byte for byte."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._options import Json

if TYPE_CHECKING:
    from slipstream.cli._output import Report
    from slipstream.ship.export import LayerNoise

app = typer.Typer(
    no_args_is_help=True,
    help="Convert a trained model to firmware for a microcontroller, verified byte for byte.",
    epilog="Start with: slipstream ship export model.tflite --target cortex-m4 -o fw/",
)

_Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="model.py:Net, or an int8 .tflite model.")
]
_Target = Annotated[str, typer.Option("--target", help="host, cortex-m4, cortex-m7 or cortex-m55.")]
_Ram = Annotated[
    str | None, typer.Option("--ram", metavar="SIZE", help="RAM of the device: 64KiB, 64k, ...")
]
_Flash = Annotated[
    str | None,
    typer.Option("--flash", metavar="SIZE", help="Flash of the device: 512KiB, 512k, ..."),
]


_Calib = Annotated[
    Path | None,
    typer.Option(
        "--calib", metavar="FILE", help="Calibration inputs for PyTorch: .npy, .npz or .pt."
    ),
]
_Weights = Annotated[
    Path | None, typer.Option("--weights", metavar="FILE", help="State dict, from torch.save.")
]
_Observer = Annotated[
    str, typer.Option(help="How calibration chooses ranges: minmax, percentile or mse.")
]


@app.command()
def export(
    model: _Model,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Output folder.")
    ],
    calib: _Calib = None,
    weights: _Weights = None,
    observer: _Observer = "percentile",
    target: _Target = "cortex-m4",
    ram: _Ram = None,
    flash: _Flash = None,
    overlap: Annotated[
        bool,
        typer.Option(help="Whether an operator's output may overlap its input in memory."),
    ] = True,
    backend: Annotated[
        str,
        typer.Option(
            metavar="straight|interpreter",
            help="Straight-line calls, or an interpreter whose model can be replaced.",
        ),
    ] = "straight",
    as_json: Json = False,
) -> None:
    """Write self-contained C99: the model, only the kernels it uses, and a memory plan.

    The folder contains model.c and model.h, the kernels, the model itself, and memory.svg, a map
    of memory use over time. The code allocates nothing; weights and other constants stay in flash.

    --backend interpreter reads the .tflite in place, by a plan in its metadata: another model needs
    no new code. On a Cortex-M4 it is about 10 % slower: straight-line C can reorder the weights.

        slipstream ship export model.py:Net --calib inputs.npy -o fw/

        slipstream ship export person_detect.tflite --ram 64KiB -o fw/
    """
    from slipstream.cli._output import emit, note, progress
    from slipstream.ship.firmware import export_firmware
    from slipstream.units import parse_bytes

    with progress("export") as report:
        data, name, noise = _read(model, calib, weights, observer, report)
        report("planning memory")
        firmware = export_firmware(
            data, name=name, device=target, overlap=overlap, backend=backend,
            ram_bytes=None if ram is None else parse_bytes(ram, "--ram"),
            flash_bytes=None if flash is None else parse_bytes(flash, "--flash"),
        )  # fmt: skip
        written = firmware.write(output)
    tables, described = firmware.tables(), firmware.to_json()
    if noise:
        from slipstream.ship.export import noise_table

        tables.append(noise_table(noise))
        described["noise"] = [asdict(layer) for layer in noise]
    emit(tables, described, as_json=as_json)
    note(f"wrote {len(written)} files; next: slipstream ship verify {output}")


def _read(
    model: str,
    calib: Path | None,
    weights: Path | None,
    observer: str,
    report: Report,
    with_noise: bool = True,
) -> tuple[bytes | Path, str | None, tuple[LayerNoise, ...]]:
    """Return the model for `export_firmware`, its name unless it is a file, and the int8 noise of
    each layer of a PyTorch model."""
    from slipstream.errors import UsageError

    if not model.rpartition(":")[0].endswith(".py"):
        return Path(model), None, ()
    if calib is None:
        raise UsageError(
            "a PyTorch model needs calibration inputs",
            remedy=f"slipstream ship export {model} --calib inputs.npy ...",
        )
    from slipstream.ship.export import export_module

    report("tracing and calibrating")
    data, noise = export_module(
        model, calib, weights=weights, observer=observer, with_noise=with_noise
    )
    return data, model.rpartition(":")[2], noise


@app.command()
def predict(
    model: _Model,
    calib: _Calib = None,
    weights: _Weights = None,
    observer: _Observer = "percentile",
    target: _Target = "cortex-m4",
    ram: _Ram = None,
    flash: _Flash = None,
    overlap: Annotated[bool, typer.Option(help="As for export.")] = True,
    as_json: Json = False,
) -> None:
    """Predict whether a model fits a device and its number of instructions, without building it.

    RAM and constants are exact; code size and instructions are estimated from measured kernels.
    Exits with code 1 if the model does not fit, and suggests how to make it fit.

        slipstream ship predict model.tflite --target cortex-m4 --ram 64KiB --flash 512KiB
    """
    from slipstream.cli._output import emit, progress
    from slipstream.ship.firmware import export_firmware, forecast
    from slipstream.units import parse_bytes

    with progress("predict") as report:
        data, name, _ = _read(model, calib, weights, observer, report, with_noise=False)
        report("planning memory")
        firmware = export_firmware(data, name=name, device=target, overlap=overlap)
        predicted = forecast(
            firmware,
            ram_bytes=None if ram is None else parse_bytes(ram, "--ram"),
            flash_bytes=None if flash is None else parse_bytes(flash, "--flash"),
        )
    emit(predicted.tables(), predicted.to_json(), as_json=as_json)
    if not predicted.fits:
        raise typer.Exit(1)


@app.command()
def fit(
    model: _Model,
    board: Annotated[
        str, typer.Option("--board", metavar="NAME", help="Board, such as stm32f446re.")
    ],
    calib: _Calib = None,
    weights: _Weights = None,
    observer: _Observer = "percentile",
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="Maximum latency, such as 100ms.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show whether a model fits a board, by how much, and which operators need most.

    For a PyTorch model that does not fit, it suggests the smallest change of its widths, kernels
    and depths that makes it fit. RAM is exact; latency assumes cycles per instruction. Exits with
    code 1 if the model does not fit.

        slipstream ship fit model.py:Net --calib inputs.npy --board stm32f446re --latency 50ms
    """
    from slipstream.child import Child
    from slipstream.cli._output import emit, progress
    from slipstream.ship.boards import Fit
    from slipstream.ship.boards import board as board_named
    from slipstream.ship.firmware import export_firmware, forecast
    from slipstream.units import parse_duration_ns

    chosen = board_named(board)
    limit_ms = None if latency is None else parse_duration_ns(latency, "--latency") / 1e6
    with progress("fit") as report:
        data, name, _ = _read(model, calib, weights, observer, report, with_noise=False)
        report("planning memory")
        firmware = export_firmware(data, name=name, device=chosen.target)
        predicted = forecast(firmware, ram_bytes=chosen.ram, flash_bytes=chosen.flash)
        found = Fit(chosen, predicted, limit_ms)
        if not found.fits and name is not None:
            report("searching for the nearest change that fits")
            with Child() as child:
                nearest = child.call(
                    "slipstream.nas.board_search:nearest_in_file", timeout_s=600,
                    path=str(Path(model.rpartition(":")[0]).resolve()), name=name,
                    calibration=str(calib), weights=str(weights or ""), board=board,
                    latency_ms=limit_ms,
                )  # fmt: skip
            found = replace(found, nearest=nearest)
        elif not found.fits:
            found = replace(found, nearest="; ".join(predicted.remedies()))
    emit(found.table(), found.to_json(), as_json=as_json)
    if not found.fits:
        raise typer.Exit(1)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that export wrote.")],
    against: Annotated[
        str, typer.Option(help="tflite-micro, or litert with its reference kernels.")
    ] = "tflite-micro",
    inputs: Annotated[int, typer.Option(min=1, max=10_000, help="Number of random inputs.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    emulate: Annotated[
        bool, typer.Option(help="Also run on the emulated processor and count instructions.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Compile and run the firmware, and compare every output byte with another runtime.

    It runs on this machine and, for a Cortex-M, under qemu-system-arm, which counts instructions.
    Exits with code 1 if any byte differs.

        slipstream ship verify fw/ --inputs 200
    """
    from slipstream.cli._output import emit, progress
    from slipstream.ship.firmware import read_firmware, verify_firmware

    exported = read_firmware(folder)
    with progress("verify") as report:
        comparison = verify_firmware(
            exported, against=against, sets=inputs, seed=seed, emulate=emulate, report=report
        )
    emit(comparison.tables(), comparison.to_json(), as_json=as_json)
    if not comparison.equal:
        raise typer.Exit(1)
