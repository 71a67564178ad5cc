"""``slipstream scale``: predict step time by number of workers, with scaling limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import _options as options
from slipstream.cli._output import emit_result, note, progress

app = typer.Typer(
    no_args_is_help=True,
    help="Predict how a recorded step scales over the devices of a cluster, and what limits it.",
    epilog="Start with: slipstream scale curve run.slipgraph --cluster h100x8-100gbe",
)


@app.callback()
def scale() -> None:
    """Keep `curve` a subcommand; typer would drop the name of a single command."""


@app.command()
@options.asks(options.Target, bare=True)
def curve(
    request: options.Request,
    cluster: Annotated[
        str,
        typer.Option(metavar="CLUSTER", help="A preset, a file or a short form."),
    ],
    cluster_sizes: options.ClusterSizes = None,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="By default 2, 4, 8, ... up to all devices."),
    ] = None,
    technique: Annotated[
        str,
        typer.Option("--technique", "-t", help="How to distribute the step: ddp, fsdp, ddp+..."),
    ] = "ddp",
    global_batch: Annotated[
        int,
        typer.Option(
            metavar="SAMPLES",
            min=0,
            help="Fixed batch size of all workers; 0: the recorded one on each, or of all workers "
            "if the technique divides samples or layers.",
        ),
    ] = 0,
    run: Annotated[
        str,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="The run around the steps: samples, evaluations, loaders, spread, and the times "
            "evaluation, metric, startup and load.",
        ),
    ] = "",
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curve to an SVG file.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Predict step time by number of workers, and every wall with its remedy and gain.

    slipstream scale curve run.slipgraph --cluster h100x8-100gbe --svg curve.svg

    slipstream scale curve run.slipgraph --cluster h100x8-100gbe --global-batch 4096
    --run samples=1.2e8,evaluations=20,evaluation=40s,metric=3s,startup=60s,load=2ms,loaders=8
    """
    from slipstream.files import write_text
    from slipstream.report.curve import curve_svg
    from slipstream.verbs.scaling import RUN_PARTS
    from slipstream.verbs.scaling import curve as curve_of
    from slipstream.verbs.walls import TrainingPlan

    where = options.cluster_of(cluster, cluster_sizes)
    assert where is not None
    plan = TrainingPlan.parse(run)
    counts = _powers(where.devices)
    if workers is not None:
        counts = options.numbers(workers, "--workers", "2,8,64")
    with progress("scaling") as report:
        graph = request.graph(report, warn=note)
        scaling = curve_of(
            graph, where, counts, text=technique, global_batch=global_batch, plan=plan,
            report=report,
        )  # fmt: skip
    if svg is not None:
        columns = [
            (str(point.workers), point.run_parts_ns, shared.wall)
            for point, _, shared in scaling.drawn
        ]
        write_text(
            svg, curve_svg(f"{scaling.title}: shares of a step, by workers", columns, RUN_PARTS)
        )
    emit_result(scaling, scaling.table(), scaling.walls_table(), as_json=as_json)


def _powers(devices: int) -> list[int]:
    """Return 2, 4, 8, ... and the number of devices."""
    counts = [2**k for k in range(1, devices.bit_length()) if 2**k <= devices]
    return counts if counts and counts[-1] == devices else [*counts, devices]
