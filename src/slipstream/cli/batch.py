"""``slipstream batch``: choose a batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import emit, need_place, progress
from slipstream.errors import InvalidArgumentError


@options.asks(options.Runnable, threads=0, timeout="5min")
def command(
    request: options.Request,
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory limit, such as 8GiB; by default all available."),
    ] = None,
    for_throughput: Annotated[
        float | None,
        typer.Option(metavar="X", help="Find the batch size that reaches X samples per second."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Batch sizes to measure; by default chosen."),
    ] = None,
    verify_largest: Annotated[
        bool,
        typer.Option(
            "--verify-largest/--no-verify-largest",
            help="Whether to run the largest batch size predicted to fit --limit.",
        ),
    ] = True,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curves to an SVG file.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Choose a batch size: time, memory and throughput of a step by number of samples.

    A few sizes are measured, each in its own process, which may run out of memory. Other sizes are
    interpolated from lines, with a knee where needed. The largest that fits --limit is run.

        slipstream batch train.py:make_workload --limit 8GiB

        slipstream batch train.py:make_workload --for-throughput 500
    """
    from slipstream.verbs.batch.advice import batch_table
    from slipstream.verbs.batch.search import batch_model

    if for_throughput is not None and not 0 < for_throughput < float("inf"):
        raise InvalidArgumentError(
            "--for-throughput",
            f"{for_throughput:g} is not a number of samples per second",
            remedy="for example --for-throughput 500",
        )
    if svg is not None:
        need_place(svg, ".svg", option="--svg")
    measured_sizes = "auto" if sizes is None else options.numbers(sizes, "--sizes", "16,40,96", 2)
    with progress("batch sizes") as report:
        model = batch_model(
            request.workload(),
            measured_sizes,
            limit=limit,
            verify_largest=verify_largest,
            threads=request.threads,
            timeout_s=request.timeout_s,
            report=report,
        )
    samples = None
    if for_throughput is not None and model.why_not is None:
        samples = model.for_throughput(for_throughput)
    if svg is not None:
        from slipstream.files import write_text
        from slipstream.report.batch import batch_svg

        write_text(svg, batch_svg(model))
    payload = model.to_json()
    if for_throughput is not None:
        payload["for_throughput"] = {"samples_per_s": for_throughput, "samples": samples}
    emit(batch_table(model, for_throughput, samples), payload, as_json=as_json)
