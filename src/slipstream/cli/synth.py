"""Find programs by search: rewrites of a model's subgraphs, functions from examples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import emit_result, note, progress
from slipstream.errors import UsageError
from slipstream.units import parse_duration_ns

app = typer.Typer(
    no_args_is_help=True,
    help="Find programs by search: rewrites of a model's subgraphs, functions from examples.",
    epilog="Start with: slipstream synth rewrites train.py:make_workload",
)


@app.command()
@options.asks(options.Target, threads=0)
def rewrites(
    request: options.Request,
    max_ops: Annotated[
        int,
        typer.Option("--max-ops", metavar="N", min=1, max=4, help="Functions in a replacement."),
    ] = 2,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="CPU time of the search.")
    ] = "2min",
    as_json: options.Json = False,
) -> None:
    """Find subgraphs of a model that a cheaper composition of torch's functions replaces.

    A replacement is timed, and its values and gradients are compared on 256 inputs of several
    shapes. Rules are stored; the technique rewrite uses them in any model on this machine.

        slipstream synth rewrites train.py:make_workload
    """
    from slipstream.verbs.request import load_recording, request_of
    from slipstream.verbs.rewriting import find_rewrites

    seconds = parse_duration_ns(budget, "--budget") / 1e9
    if request.recorded:
        recorded = request_of(load_recording(Path(request.target), note))
        if recorded is None:
            raise UsageError(
                f"'{request.target}' does not record how its workload is built",
                remedy="pass the workload itself: file.py:function",
            )
        request = recorded
    with progress(f"searching {request.target}") as report:
        found = find_rewrites(
            request.workload(), max_ops=max_ops, budget_s=seconds, threads=request.threads,
            report=report,
        )  # fmt: skip
    emit_result(found, found.table(), as_json=as_json)


@app.command()
def examples(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines of examples.")],
    max_length: Annotated[
        int,
        typer.Option("--max-length", metavar="N", min=1, max=16, help="Functions in a program."),
    ] = 8,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="Time limit of the search.")
    ] = "30s",
    python: Annotated[
        bool, typer.Option("--python", help="Print only the program, as Python source.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Find the shortest program of integers and lists that meets examples.

    Each line of the file is an example: {"input": [3, 1, 2], "output": [1, 2, 3]}; several
    arguments are a list "inputs". Other programs that meet all examples are listed, with the
    input whose output would decide between them.

        slipstream synth examples.jsonl
    """
    from slipstream.synthesis import from_examples

    with progress(f"searching {file}") as report:
        report("a program that meets all examples")
        found = from_examples(file, max_length=max_length, budget=budget)
    if python and not as_json:
        typer.echo(found.program.python_source, nl=False)
        return
    emit_result(found, found.table(), as_json=as_json)
