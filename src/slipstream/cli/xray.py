"""Find from logs why a deployed model is less accurate or slower than the trained one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli._options import Json

if TYPE_CHECKING:
    from slipstream.ship.xray.recording import Level

app = typer.Typer(
    no_args_is_help=True,
    help="Find from logs why a deployed model is less accurate or slower than the trained one.",
    epilog="Start with: slipstream xray record model.onnx --raw photos/ --preprocessing pre.py:app "
    "-o edge.xr",
)

_Model = Annotated[str, typer.Argument(metavar="MODEL", help="model.onnx or model.tflite.")]
_Raw = Annotated[
    Path | None,
    typer.Option("--raw", metavar="FOLDER", help="Raw inputs: files, read in order of name."),
]
_Preprocessing = Annotated[
    str | None,
    typer.Option(
        "--preprocessing",
        metavar="FILE",
        help="file.py:name of a Pipeline or a function, or a Pipeline as .json.",
    ),
]
_Inputs = Annotated[
    Path | None,
    typer.Option(
        "--inputs", metavar="FILE", help="Model inputs [N, ...] as .npy, instead of --raw."
    ),
]
_Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE.xr", help="The log.")]
_Level = Annotated[str, typer.Option(help="Level of detail: io, stats, layers or full.")]
_Reference = Annotated[
    bool,
    typer.Option("--plain-kernels", help="Use the runtime's plain kernels, not optimised ones."),
]


@app.command()
def record(
    model: _Model,
    output: _Output,
    raw: _Raw = None,
    inputs: _Inputs = None,
    preprocessing: _Preprocessing = None,
    level: _Level = "stats",
    every: Annotated[int, typer.Option(min=1, help="Record the layers of every Nth frame.")] = 1,
    plain_kernels: _Reference = False,
) -> None:
    """Run a model over raw inputs or arrays, and record its inputs, layers and outputs.

    In your own app, three lines of Python do the same: see docs/xray.md. At level stats, a log has
    sums and histograms only, from which no image can be reconstructed.

        slipstream xray record model.onnx --raw photos/ --preprocessing pre.py:app -o edge.xr
    """
    from slipstream.cli._output import need_place, note, progress
    from slipstream.ship import xray

    need_place(output, ".xr")
    detail: Level = level  # type: ignore[assignment]
    with (
        progress("record") as report,
        xray.record(
            output,
            detail,
            every=every,
            preprocessing=_stages(preprocessing),
            reference=plain_kernels,
        ) as recorder,
    ):
        for number, (sample, path) in enumerate(_samples(raw, inputs, preprocessing)):
            report(f"frame {number + 1}")
            recorder.run(model, sample, raw=path)
    note(f"wrote {recorder.frames} frames; next: slipstream xray replay {output}")


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="Log of the deployed model.")],
    output: _Output,
    model: Annotated[str, typer.Option("--model", help="A trusted model.")],
    preprocessing: _Preprocessing = None,
    raw: _Raw = None,
    level: Annotated[str | None, typer.Option(help="By default that of LOG.")] = None,
    plain_kernels: _Reference = False,
) -> None:
    """Run the same frames through a trusted pipeline and model, and record them.

    slipstream xray replay edge.xr --model model.onnx --preprocessing pre.py:reference -o ref.xr
    """
    from slipstream.cli._output import need_place, note, progress
    from slipstream.ship import xray

    need_place(output, ".xr")
    with progress("replay") as report:
        xray.replay(
            log, model, output, preprocessing=_pipeline(preprocessing), raws=_files(raw),
            level=level, plain_kernels=plain_kernels, report=report,  # type: ignore[arg-type]
        )  # fmt: skip
    note(f"wrote {output}; next: slipstream xray compare {output} {log}")


@app.command()
def compare(
    reference: Annotated[Path, typer.Argument(metavar="REFERENCE", help="Log of the reference.")],
    deployed: Annotated[
        Path, typer.Argument(metavar="DEPLOYED", help="Log of the deployed model.")
    ],
    preprocessing: _Preprocessing = None,
    raw: _Raw = None,
    labels: Annotated[
        Path | None,
        typer.Option("--labels", metavar="FILE", help="Labels as JSON: a list, or by key."),
    ] = None,
    assertions: Annotated[
        Path | None,
        typer.Option("--assertions", metavar="FILE.py", help="Functions with @xray.assertion."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML report.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what differs: preprocessing and its fix, drift of layers, outputs, latency.

    Exits with code 1 if an assertion fails; it is always asserted that no layer outputs NaN.

        slipstream xray compare ref.xr edge.xr --html report.html
    """
    from slipstream.cli._output import emit_result, need_place, note, progress
    from slipstream.ship import xray
    from slipstream.ship.xray.comparing import read_labels

    if html is not None:
        need_place(html, ".html", option="--html")
    if assertions is not None:
        _module(assertions)
    truth = None if labels is None else read_labels(labels)
    with progress("compare") as report:
        comparison = xray.compare(
            reference,
            deployed,
            labels=truth,
            raws=_files(raw),
            pipeline=_stages(preprocessing),
            report=report,
        )
    if html is not None:
        from slipstream.report.xray import write_xray

        write_xray(comparison, html)
        note(f"wrote {html}")
    emit_result(comparison, *comparison.tables(), as_json=as_json)
    if comparison.failures:
        raise typer.Exit(1)


@app.command()
def bisect(
    reference: Annotated[
        str, typer.Argument(metavar="REFERENCE", help="The float model, .onnx or .tflite.")
    ],
    deployed: Annotated[
        str, typer.Argument(metavar="DEPLOYED", help="The quantised model, of the same kind.")
    ],
    inputs: Annotated[
        Path, typer.Option("--inputs", metavar="FILE", help="Inputs [N, ...], .npy.")
    ],
    labels: Annotated[
        Path | None, typer.Option("--labels", metavar="FILE", help="Labels [N], .npy.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the layers that introduce error, and the smallest set to keep in float.

    Each layer runs on the activations of the reference, so that it is not blamed for the error of
    other layers. Without labels, the reference's own top-1 predictions are the target.

        slipstream xray bisect model.onnx model_int8.onnx --inputs x.npy --labels y.npy
    """
    from slipstream.cli._output import emit_result, progress
    from slipstream.errors import UsageError
    from slipstream.files import read_array
    from slipstream.ship import xray

    with progress("bisect") as report:
        x = read_array(inputs, UsageError)
        y = None if labels is None else read_array(labels, UsageError)
        bisection = xray.bisect(reference, deployed, x, y, report=report)
    emit_result(bisection, *bisection.tables(), as_json=as_json)


@app.command()
def latency(
    model: _Model,
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", metavar="FILE", help="Inputs [N, ...], .npy; by default zeros."),
    ] = None,
    plain_kernels: _Reference = False,
    as_json: Json = False,
) -> None:
    """Time every operator separately, in a pass that records nothing, and flag the slow ones.

    slipstream xray latency model.onnx
    """
    from slipstream.cli._output import emit_result, progress
    from slipstream.errors import UsageError
    from slipstream.files import read_array
    from slipstream.ship import xray

    with progress("latency") as report:
        x = None if inputs is None else read_array(inputs, UsageError)
        timings = xray.latency(model, x, plain_kernels=plain_kernels, report=report)
    emit_result(timings, *timings.tables(), as_json=as_json)


def _files(folder: Path | None) -> list[Path] | None:
    from slipstream.errors import UsageError

    if folder is None:
        return None
    if not folder.is_dir():
        raise UsageError(f"--raw: '{folder}' is not a folder", remedy="pass an existing folder")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if not files:
        raise UsageError("--raw: the folder contains no files", where=str(folder))
    return files


def _samples(raw: Path | None, inputs: Path | None, preprocessing: str | None) -> Any:
    """Yield each frame as (input with batch axis, path or None)."""
    import numpy as np

    from slipstream.errors import UsageError
    from slipstream.files import read_array

    if (raw is None) == (inputs is None):
        raise UsageError(
            "the model needs inputs from one source", remedy="pass --raw FOLDER or --inputs x.npy"
        )
    if inputs is not None:
        for sample in read_array(inputs, UsageError):
            yield sample[None], None
        return
    pipeline = _pipeline(preprocessing)
    if pipeline is None:
        raise UsageError(
            "--raw needs --preprocessing", remedy="for example --preprocessing pre.py:app"
        )
    for path in _files(raw) or ():
        sample = np.asarray(pipeline(path))
        yield (sample[None] if _stages(preprocessing) else sample), str(path)


def _pipeline(named: str | None) -> Any:
    """Load the pipeline or function `named`; None for None."""
    import json

    from slipstream.errors import UsageError
    from slipstream.files import read_bytes
    from slipstream.runtimes.preprocessing import Pipeline
    from slipstream.runtimes.python import function_at, required_parameters

    if named is None:
        return None
    if named.endswith(".json"):
        try:
            return Pipeline.from_dict(json.loads(read_bytes(Path(named), UsageError)))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"not a valid pipeline: {error}", where=named) from error
    function: Any = function_at(named)
    if isinstance(function, Pipeline) or required_parameters(function):
        return function
    return function()


def _stages(named: str | None) -> Any:
    """Load a `Pipeline`, whose stages can be varied; None for a function."""
    from slipstream.runtimes.preprocessing import Pipeline

    pipeline = _pipeline(named)
    return pipeline if isinstance(pipeline, Pipeline) else None


def _module(path: Path) -> None:
    """Execute a file of assertions."""
    import importlib.util

    from slipstream.errors import UsageError

    spec = importlib.util.spec_from_file_location(f"slipstream_assertions_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"--assertions: '{path}' is not a file", remedy="name a .py file")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
