"""Find why a deployed model is worse or slower than the one that was trained, by its logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli._options import Json

if TYPE_CHECKING:
    from slipstream.ship.xray.recording import Level

app = typer.Typer(
    no_args_is_help=True,
    help="Find why a deployed model is worse or slower than the one that was trained, by its logs.",
    epilog="Start with: slipstream xray record model.onnx --raw photos/ --preprocessing pre.py:app "
    "-o edge.xr",
)

_Model = Annotated[str, typer.Argument(metavar="MODEL", help="model.onnx or model.tflite.")]
_Raw = Annotated[
    Path | None,
    typer.Option("--raw", metavar="FOLDER", help="Raw inputs: files, taken in order of name."),
]
_Preprocessing = Annotated[
    str | None,
    typer.Option(
        "--preprocessing",
        metavar="FILE",
        help="file.py:name of a Pipeline or a function, or its .json.",
    ),
]
_Inputs = Annotated[
    Path | None,
    typer.Option(
        "--inputs", metavar="FILE", help="Model inputs [N, ...] as .npy, in place of --raw."
    ),
]
_Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE.xr", help="The log.")]
_Level = Annotated[str, typer.Option(help="io, stats, layers or full.")]
_Reference = Annotated[
    bool,
    typer.Option("--plain-kernels", help="On the runtime's plain kernels, not optimised ones."),
]


@app.command()
def record(
    model: _Model,
    output: _Output,
    raw: _Raw = None,
    inputs: _Inputs = None,
    preprocessing: _Preprocessing = None,
    level: _Level = "stats",
    every: Annotated[int, typer.Option(min=1, help="Layers of one frame in so many.")] = 1,
    plain_kernels: _Reference = False,
) -> None:
    """Run a model over raw inputs or arrays, and record its inputs, layers and outputs.

    In an app of your own, three lines of Python do the same: see the page on the x-ray. At level
    stats a log holds sums and histograms, of which no picture can be made.

        slipstream xray record model.onnx --raw photos/ --preprocessing pre.py:app -o edge.xr
    """
    from slipstream.cli._output import need_place, note, progress
    from slipstream.ship import xray

    need_place(output, ".xr")
    kept: Level = level  # type: ignore[assignment]
    with (
        progress("record") as report,
        xray.record(
            output, kept, every=every, preprocessing=_known(preprocessing), reference=plain_kernels
        ) as recorder,
    ):
        for number, (sample, path) in enumerate(_samples(raw, inputs, preprocessing)):
            report(f"frame {number + 1}")
            recorder.run(model, sample, raw=path)
    note(f"wrote {recorder.frames} frames; next: slipstream xray replay {output}")


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="Of the deployed model.")],
    output: _Output,
    model: Annotated[str, typer.Option("--model", help="A model that is trusted.")],
    preprocessing: _Preprocessing = None,
    raw: _Raw = None,
    level: Annotated[str | None, typer.Option(help="That of LOG if not said.")] = None,
    plain_kernels: _Reference = False,
) -> None:
    """Run the same frames through a pipeline and a model that are trusted, and record that.

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
        typer.Option("--labels", metavar="FILE", help="JSON: right answers, a list or by key."),
    ] = None,
    assertions: Annotated[
        Path | None,
        typer.Option("--assertions", metavar="FILE.py", help="Functions with @xray.assertion."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Name what differs: preprocessing and its fix, drift of layers, outputs, latency.

    Leaves with code 1 where an assertion fails; that no layer gives NaN is always asserted.

        slipstream xray compare ref.xr edge.xr --html report.html
    """
    from slipstream.cli._output import emit_result, need_place, note, progress
    from slipstream.ship import xray
    from slipstream.ship.xray.comparing import read_labels

    if html is not None:
        need_place(html, ".html", option="--html")
    if assertions is not None:
        _module(assertions)
    right = None if labels is None else read_labels(labels)
    with progress("compare") as report:
        comparison = xray.compare(
            reference,
            deployed,
            labels=right,
            raws=_files(raw),
            pipeline=_known(preprocessing),
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
        Path | None, typer.Option("--labels", metavar="FILE", help="Right answers [N], .npy.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Name the layers that introduce error, and the fewest to keep in float.

    Each layer is run on what the reference's layers gave, so that no layer is blamed for another's
    error. Without labels the reference's own first choices are what has to be met.

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
        typer.Option("--inputs", metavar="FILE", help="Inputs [N, ...], .npy; else zeros."),
    ] = None,
    plain_kernels: _Reference = False,
    as_json: Json = False,
) -> None:
    """Time every operator on its own, in a pass that records nothing, and flag the slow ones.

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
        raise UsageError(f"there is no folder '{folder}'", remedy="--raw FOLDER")
    files = sorted(one for one in folder.iterdir() if one.is_file())
    if not files:
        raise UsageError("holds no files", where=str(folder))
    return files


def _samples(raw: Path | None, inputs: Path | None, preprocessing: str | None) -> Any:
    """(input with its batch axis, path or None) of each frame."""
    import numpy as np

    from slipstream.errors import UsageError
    from slipstream.files import read_array

    if (raw is None) == (inputs is None):
        raise UsageError(
            "what the model is fed is missing", remedy="--raw FOLDER, or --inputs x.npy"
        )
    if inputs is not None:
        for sample in read_array(inputs, UsageError):
            yield sample[None], None
        return
    pipeline = _pipeline(preprocessing)
    if pipeline is None:
        raise UsageError(
            "how raw inputs are prepared is missing", remedy="--preprocessing pre.py:app"
        )
    for path in _files(raw) or ():
        sample = np.asarray(pipeline(path))
        yield (sample[None] if _known(preprocessing) else sample), str(path)


def _pipeline(named: str | None) -> Any:
    """The pipeline or function that is meant; None where none is named."""
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
            raise UsageError(f"holds no pipeline: {error}", where=named) from error
    function: Any = function_at(named)
    if isinstance(function, Pipeline) or required_parameters(function):
        return function
    return function()


def _known(named: str | None) -> Any:
    """The same where it is a pipeline, whose stages can be varied."""
    from slipstream.runtimes.preprocessing import Pipeline

    pipeline = _pipeline(named)
    return pipeline if isinstance(pipeline, Pipeline) else None


def _module(path: Path) -> None:
    """Run a file of assertions."""
    import importlib.util

    from slipstream.errors import UsageError

    spec = importlib.util.spec_from_file_location(f"slipstream_assertions_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"there is no file '{path}'", remedy="--assertions FILE.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
