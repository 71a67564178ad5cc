"""How a step scales: its time against the number of workers, and the walls it meets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._cluster import ClusterSizes
from slipstream.cli._workload import Json, Target

if TYPE_CHECKING:
    from slipstream.verbs.scaling import Point

app = typer.Typer(
    no_args_is_help=True,
    help="How a recorded step scales over the devices of a cluster, and which walls it meets.",
    epilog="Start with: slipstream scale curve run.slipgraph --cluster h100x8-100gbe",
)


@app.callback()
def scale() -> None:
    """Keep `curve` a word of its own."""


@app.command()
def curve(
    workload: Target,
    cluster: Annotated[
        str,
        typer.Option("--cluster", metavar="CLUSTER", help="A preset, a file or a short form."),
    ],
    cluster_sizes: ClusterSizes = None,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="By default 2, 4, 8, ... up to all devices."),
    ] = None,
    technique: Annotated[
        str, typer.Option("--technique", "-t", help="What spreads the step: ddp, fsdp, ddp+...")
    ] = "ddp",
    global_batch: Annotated[
        int,
        typer.Option(
            metavar="SAMPLES", min=0, help="Of all workers, kept the same; 0: it grows with them."
        ),
    ] = 0,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curve into an SVG file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """A step's time against the number of workers, what it goes to, and which wall it meets.

    slipstream scale curve run.slipgraph --cluster h100x8-100gbe --svg curve.svg
    """
    from slipstream.cli._cluster import cluster_of
    from slipstream.cli._output import emit, progress
    from slipstream.cli._workload import graph_of
    from slipstream.report.curve import curve_svg, write_curve
    from slipstream.tables import Column, Table
    from slipstream.units import format_duration, format_percent
    from slipstream.verbs.scaling import PARTS
    from slipstream.verbs.scaling import curve as curve_of

    where = cluster_of(cluster, cluster_sizes)
    assert where is not None
    counts = _counts(workers, where.devices)
    with progress("scaling") as say:
        graph = graph_of(workload, None, None, threads=0, steps=24, timeout="5min", say=say)
        points = curve_of(
            graph, where, counts, text=technique, global_batch=global_batch, say=say
        )  # fmt: skip
    drawn = [p for p in points if p.prediction.shared is not None]
    table = Table(
        [
            Column("workers", "right"), Column("step", "right"), Column("90 % interval", "right"),
            Column("samples/s", "right"), Column("efficiency", "right"),
            Column("exposed", "right"), Column("wall"), Column("then"),
        ],
        [
            (
                str(p.workers),
                format_duration(p.prediction.step_ns),
                _reach(p),
                f"{p.prediction.samples[1] / p.prediction.step_ns * 1e9:.4g}"
                if p.prediction.samples[1] else "-",
                format_percent(p.efficiency),
                format_duration(one.exposed_ns),
                one.walls[0].name if one.walls else "-",
                one.next_wall or "-",
            )
            for p in drawn if (one := p.prediction.shared) is not None
        ],
        title=f"{technique} on {where.name}",
        notes=[
            f"{p.workers} workers: {p.prediction.why_not}" for p in points if p.prediction.why_not
        ],
    )  # fmt: skip
    if svg is not None:
        title = f"{technique} on {where.name}: time of a step"
        columns = [(str(p.workers), p.parts_ns, _wall(p)) for p in drawn]
        write_curve(svg, curve_svg(title, columns, PARTS))
    payload = [
        {"workers": p.workers, "parts_ns": p.parts_ns, **p.prediction.to_json()} for p in points
    ]
    emit(table, payload, as_json=as_json)


def _counts(text: str | None, devices: int) -> list[int]:
    from slipstream.errors import InvalidArgumentError

    if text is None:
        counts = [2**k for k in range(1, devices.bit_length()) if 2**k <= devices]
        return counts if counts and counts[-1] == devices else [*counts, devices]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InvalidArgumentError(
            "--workers", f"'{text}' is not a list of numbers", remedy="as --workers 2,8,64"
        )
    return [int(part) for part in parts]


def _reach(point: Point) -> str:
    from slipstream.units import format_duration

    p = point.prediction
    low, high = (format_duration(p.step_ns * end / p.ratio) for end in (p.low, p.high))
    return f"[{low}, {high}]"


def _wall(point: Point) -> str:
    one = point.prediction.shared
    return one.walls[0].name if one is not None and one.walls else ""
