"""Predict and search schedules of loop nests, and train the cost model that predicts them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli._options import Json
from slipstream.cli._output import emit, need_place, note, progress
from slipstream.tables import Column, Table

if TYPE_CHECKING:
    from slipstream.techniques.loops import Accuracy, CostModel, Estimate

app = typer.Typer(
    no_args_is_help=True,
    help="Predict and search schedules of loop nests, and train the model that predicts them.",
    epilog="Start with: slipstream loops search nests.py:product",
)

_Program = Annotated[
    str,
    typer.Argument(
        metavar="PROGRAM",
        help="file.py:name of a slipstream.loops.Program, or of a function that returns one; or a "
        ".json file of Program.to_json().",
    ),
]
_Model = Annotated[
    Path | None,
    typer.Option("--model", metavar="FILE.npz", help="Cost model; default: the package's own."),
]
_Samples = Annotated[
    list[Path], typer.Argument(metavar="SAMPLES...", help="Files written by slipstream loops gen.")
]


@app.command()
def predict(
    program: _Program,
    transform: Annotated[
        list[str],
        typer.Option(
            "-t", "--transform", metavar="STEPS",
            help='Steps joined with +, such as "interchange(j,k)+vectorise(j)"; repeat to compare.',
        ),
    ],
    model: _Model = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Predict the speed-up of transformations of a loop nest without running it.

    Steps are tile(i,j,32,64), interchange(i,j), vectorise(j), unroll(k,4), fuse(0,1,2), reverse(i),
    shift(i,1) and skew(t,i,1); tile(i,8)@1 is for statement 1. An illegal one is an error that
    names the dependence.

        slipstream loops predict nests.py:product -t "tile(i,j,32,64)" -t "interchange(j,k)"
    """
    from slipstream.techniques import loops

    nest = loops.read_program(program)
    schedules = [loops.schedule(nest, text) for text in transform]
    estimates = loops.CostModel.load(model).predict(nest, schedules)
    rows = [[text, *_cells(e)] for text, e in zip(transform, estimates, strict=True)]
    table = Table(
        [Column("transformation"), Column("speed-up", "right"), Column("80 % interval", "right")],
        rows, notes=["predicted for one thread; measure it with: slipstream loops search"],
    )  # fmt: skip
    payload = [
        {"transform": t, **dataclasses.asdict(e)} for t, e in zip(transform, estimates, strict=True)
    ]
    emit(table, payload, as_json=as_json)


@app.command()
def search(
    program: _Program,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.cpp", help="Write C++ of the best schedule."),
    ] = None,
    beam: Annotated[int, typer.Option(min=1, help="Schedules retained after each stage.")] = 16,
    execute: Annotated[
        int, typer.Option(min=0, help="Best predictions to compile and time; 0 for none.")
    ] = 5,
    model: _Model = None,
    as_json: Json = False,
) -> None:
    """Search for a fast schedule of a loop nest: predict thousands, execute the five best.

    Kernels run in a child process; each result is compared with that of the unscheduled nest.

        slipstream loops search nests.py:product -o product.cpp
    """
    from slipstream.files import write_text
    from slipstream.techniques import loops

    if output is not None:
        need_place(output, ".cpp", ".cc")
    nest = loops.read_program(program)
    with progress("search") as report:
        result = loops.autoschedule(
            nest, loops.CostModel.load(model), beam=beam, execute=execute, report=report
        )
    if output is not None:
        write_text(output, result.code)
        note(f"wrote {output}")
    rows = [
        [
            str(candidate.schedule) or "as written",
            "" if candidate.measured is None else f"{candidate.measured:.2f}x",
            *_cells(candidate.predicted),
        ]
        for candidate in result.candidates
    ]
    payload = [
        {
            "schedule": candidate.schedule.to_json(), "steps": str(candidate.schedule),
            "measured": candidate.measured, "predicted": dataclasses.asdict(candidate.predicted),
        }
        for candidate in result.candidates
    ]  # fmt: skip
    columns = [Column("schedule"), *(Column(name, "right") for name in
               ("measured", "predicted", "80 % interval"))]  # fmt: skip
    table = Table(columns, rows, notes=[f"{result.scored:,} schedules were compared"])
    emit(table, {"scored": result.scored, "candidates": payload}, as_json=as_json)


@app.command()
def gen(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.jsonl")],
    programs: Annotated[int, typer.Option(min=1, help="Number of programs.")] = 5000,
    schedules: Annotated[int, typer.Option(min=1, help="Schedules per program.")] = 24,
    seed: Annotated[int, typer.Option(help="Seed of programs and schedules.")] = 0,
) -> None:
    """Generate random loop nests and time random legal schedules of them.

    Program N depends on the seed and N only: repeat an interrupted command to continue.

        slipstream loops gen --programs 5000 -o samples.jsonl
    """
    from slipstream.techniques import loops

    need_place(output, ".jsonl")
    with progress("loops gen") as report:
        added = loops.generate_samples(
            output, programs, schedules, seed, budget_s=0.3, report=report
        )
    note(f"added {added} programs to {output}; next: slipstream loops train {output} -o model.npz")


@app.command()
def train(
    samples: _Samples,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.npz", help="The model.")],
    trees: Annotated[int, typer.Option(min=1, help="Trees of the model.")] = 1000,
    as_json: Json = False,
) -> None:
    """Train a cost model, for another processor or compiler, and evaluate it.

    A quarter of the programs, always the same, is only used to calibrate and evaluate the model.

        slipstream loops train samples.jsonl -o model.npz
    """
    from slipstream.techniques import loops

    need_place(output, ".npz")
    with progress("loops train") as report:
        model, accuracy = loops.train(_read(samples), trees, report=report)
    model.save(output)
    note(f"wrote {output}")
    _emit(accuracy, model, as_json)


@app.command("eval")
def evaluate(samples: _Samples, model: _Model = None, as_json: Json = False) -> None:
    """Compare predictions with measurements, for programs that no model is trained on.

    slipstream loops eval samples.jsonl --model model.npz
    """
    from slipstream.techniques import loops

    loaded = loops.CostModel.load(model)
    with progress("loops eval") as report:
        accuracy = loops.evaluate(loaded, _read(samples), report)
    _emit(accuracy, loaded, as_json)


def _cells(estimate: Estimate) -> tuple[str, str]:
    """Return the speed-up and its interval as text."""
    return f"{estimate.speedup:.2f}x", f"[{estimate.low:.2f}, {estimate.high:.2f}]"


def _read(paths: list[Path]) -> Any:
    from slipstream.techniques import loops

    return (measured for path in paths for measured in loops.read_samples(path))


def _emit(accuracy: Accuracy, model: CostModel, as_json: bool) -> None:
    shown = {
        "programs": f"{accuracy.programs:,}", "schedules": f"{accuracy.schedules:,}",
        "mean error": f"{100 * accuracy.mape:.1f} %",
        "median error": f"{100 * accuracy.median:.1f} %", "Pearson": f"{accuracy.pearson:.3f}",
        "Spearman": f"{accuracy.spearman:.3f}",
        "per program": f"{accuracy.spearman_per_program:.3f}",
        "in the 80 % interval": f"{100 * accuracy.coverage:.0f} %",
    }  # fmt: skip
    table = Table([Column(name, "right") for name in shown], [list(shown.values())])
    emit(table, {"accuracy": dataclasses.asdict(accuracy), "model": model.about}, as_json=as_json)
