"""``slipstream batch``: which batch size, and why?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli._workload import Json, Runnable, ScriptArguments, Set, Threads, Timeout

if TYPE_CHECKING:
    from slipstream.measure.statistics import Interval
    from slipstream.tables import Table
    from slipstream.verbs.batch.model import BatchModel

_TIMES = (0.5, 1, 2, 4, 8)
_GAIN = 1.03


def command(
    workload: Runnable,
    script_arguments: ScriptArguments = None,
    settings: Set = None,
    limit: Annotated[
        str | None,
        typer.Option(
            "--limit", metavar="SIZE", help="Memory of the process, as 8GiB; else what there is."
        ),
    ] = None,
    for_throughput: Annotated[
        float | None,
        typer.Option(
            "--for-throughput", metavar="X", help="Which batch makes X samples per second?"
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option("--sizes", metavar="N,N,...", help="Batch sizes to measure; else chosen."),
    ] = None,
    try_largest: Annotated[
        bool,
        typer.Option(
            "--try/--no-try", help="Whether to run the largest batch that should fit --limit."
        ),
    ] = True,
    threads: Threads = 0,
    timeout: Timeout = "5min",
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw the curves into an SVG file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Which batch size: time, memory and throughput of a step against its samples.

    A few sizes are measured, each in a process of its own that may run out of memory; any other
    follows from lines through them, which may have a knee. The largest that fits --limit is tried.

        slipstream batch train.py:make_workload --limit 8GiB

        slipstream batch train.py:make_workload --for-throughput 500
    """
    from slipstream.cli._output import emit, need_place, progress
    from slipstream.cli._workload import workload_of
    from slipstream.errors import InvalidArgumentError
    from slipstream.units import parse_duration_ns
    from slipstream.verbs.batch.search import batch_model

    # Before anything is measured.
    if for_throughput is not None and not 0 < for_throughput < float("inf"):
        raise InvalidArgumentError(
            "--for-throughput",
            f"{for_throughput:g} is no number of samples a second",
            remedy="as --for-throughput 500",
        )
    if svg is not None:
        need_place(svg, ".svg", option="--svg")
    with progress("batch sizes") as say:
        model = batch_model(
            workload_of(workload, script_arguments, settings),
            "auto" if sizes is None else _sizes(sizes),
            limit=limit,
            try_largest=try_largest,
            threads=threads,
            timeout_s=parse_duration_ns(timeout, "--timeout") / 1e9,
            say=say,
        )
    wanted = None
    if for_throughput is not None and model.why_not is None:
        wanted = model.for_throughput(for_throughput)
    if svg is not None:
        from slipstream.report.batch import batch_svg
        from slipstream.report.curve import write_curve

        write_curve(svg, batch_svg(model))
    payload = model.to_json()
    if for_throughput is not None:
        payload["for_throughput"] = {"samples_per_s": for_throughput, "samples": wanted}
    emit(_table(model, for_throughput, wanted), payload, as_json=as_json)


def _sizes(text: str) -> list[int]:
    from slipstream.errors import InvalidArgumentError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InvalidArgumentError(
            "--sizes", f"'{text}' is not a list of numbers", remedy="as --sizes 16,40,96"
        )
    return [int(part) for part in parts]


def _table(model: BatchModel, throughput: float | None, wanted: int | None) -> Table:
    from slipstream.tables import Column, Table

    measured = {one.samples for one in model.measured}
    tried = {one.samples for one in model.tried if one.ran}
    most, best = model.max_batch(), model.best()
    whole = [round(model.samples * f / model.quantum) * model.quantum for f in _TIMES]
    shown = {size for size in whole if 0 < size <= most} if model.why_not is None else set()
    shown |= {size for size in (best, wanted or 0, model.largest_tried or 0) if size}
    if model.why_not is not None:
        shown &= measured
    columns = [
        Column("samples", "right"), Column("step", "right"), Column("90 % interval", "right"),
        Column("samples/s", "right"), Column("tensors", "right"), Column("process", "right"),
        Column("from"), Column(""),
    ]  # fmt: skip
    rows = []
    for size in sorted(shown | measured):
        remarks = [
            word
            for word, this in (
                ("as it is", model.samples), ("take this", best), ("largest", model.largest_tried)
            )
            if size == this
        ]  # fmt: skip
        how = "measured" if size in measured else "tried" if size in tried else "predicted"
        rows.append((*_row(model, size), how, ", ".join(remarks)))
    clock = "CPU time, one thread" if model.clock == "cpu" else "wall time"
    notes = [*_advice(model, best, most), *_wanted(model, throughput, wanted, most)]
    return Table(columns, rows, title=f"{model.workload}, {clock}", notes=notes)


def _row(model: BatchModel, size: int) -> tuple[str, ...]:
    from slipstream.errors import MeasurementError
    from slipstream.units import format_bytes, format_duration

    took = model.time(size)
    try:
        tensors = format_bytes(model.memory(size).estimate)
    except MeasurementError:
        tensors = "-"
    return (
        str(size),
        format_duration(took.estimate),
        _reach(took, format_duration),
        f"{model.throughput(size).estimate:.4g}",
        tensors,
        format_bytes(model.process(size).estimate),
    )


def _reach(interval: Interval, as_text: Any) -> str:
    return f"[{as_text(interval.low)}, {as_text(interval.high)}]"


def _advice(model: BatchModel, best: int, most: int) -> list[str]:
    """In words: which batch, why, where the knee is, and what a larger one would bring."""
    from slipstream.units import format_bytes

    lines = []
    if not best:
        return [f"no batch fits into {format_bytes(model.limit_bytes)}"]
    if model.why_not is not None:
        lines.append(f"times of other sizes are not predicted: {model.why_not}")
    gain = model.throughput(best).estimate / model.throughput(_measured(model)).estimate
    if best == model.samples or abs(gain - 1) < _GAIN - 1:
        lines.append(f"{_measured(model)} samples are as fast a batch as any that fits")
    elif gain > 1:
        lines.append(
            f"take {best}: {gain:.2f} times as many samples per second as {_measured(model)}"
        )
    else:
        lines.append(f"take {best}: as fast as {_measured(model)}, in less memory")
    if model.why_not is None:
        end = model.throughput(most).estimate / model.throughput(best).estimate
        if end < 1 - (_GAIN - 1):
            lines.append(f"beyond it batches grow slower per sample: {1 / end:.2f} times at {most}")
        elif most > best:
            lines.append(
                f"no gain worth its memory beyond {best}: the largest batch that fits, {most}, "
                f"makes {100 * (end - 1):.1f} % more samples per second"
            )
        if model.knee is not None:
            lines.append(
                f"there is a knee at {model.knee} samples: each one beyond it takes "
                f"{model.dearer_beyond_knee:.2f} times as long as one before"
            )
    return [*lines, _largest(model, most)]


def _largest(model: BatchModel, most: int) -> str:
    """How many samples fit, and how that is known."""
    from slipstream.units import format_bytes

    said = f"at most {most} samples fit into {format_bytes(model.limit_bytes)}"
    if model.largest_tried is not None:
        above = [one for one in model.tried if not one.ran and one.samples > most]
        ended = "there was no time for larger ones"
        if above:
            least = min(above, key=lambda one: one.samples)
            # A size needs more in one process than in another.
            how = "ran, and would not always" if least.process_bytes else "did not fit"
            ended = f"{least.samples} {how}"
        return f"{said}: tried; {ended}"
    seen = max(one.samples for one in model.measured)
    trust = f" (measured up to {seen})" if most > 2 * seen else ""
    failed = f"; {min(model.too_large)} did not fit" if model.too_large else ""
    return f"{said}: predicted{trust}{failed}"


def _measured(model: BatchModel) -> int:
    """The batch as it is, or what was measured nearest to it."""
    return min((one.samples for one in model.measured), key=lambda size: abs(size - model.samples))


def _wanted(
    model: BatchModel, throughput: float | None, wanted: int | None, most: int
) -> list[str]:
    if throughput is None:
        return []
    if model.why_not is not None:
        return [f"for the same reason nothing is told about {throughput:g} samples/s"]
    if wanted is None:
        return [
            f"{throughput:g} samples/s: no batch is that fast; the most is "
            f"{model.max_throughput:.4g}"
        ]
    fits = "" if wanted <= most else f", which does not fit: at most {most} do"
    return [f"{throughput:g} samples/s take a batch of {wanted}{fits}"]
