"""Sum gradients in the network: an aggregator for ranks, and what it would change."""

from __future__ import annotations

from typing import Annotated

import typer

from slipstream.cli._options import Json, load_cluster

app = typer.Typer(
    no_args_is_help=True,
    help="Sum gradients in the network: serve an aggregator, measure it, predict what it changes.",
    epilog="Start with: slipstream cluster aggregate bench --ranks 2",
)


@app.command()
def serve(
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address of one interface.")
    ] = "127.0.0.1:4700",
    slots: Annotated[
        int, typer.Option("--slots", help="Pieces in progress, of all jobs together.", min=2)
    ] = 1024,
    parent: Annotated[
        str | None,
        typer.Option(
            "--parent", metavar="HOST:PORT", help="Aggregator that sums further (a tree)."
        ),
    ] = None,
    members: Annotated[
        int | None,
        typer.Option(
            "--members", help="Ranks or aggregators below, per job; with --parent.", min=1
        ),
    ] = None,
) -> None:
    """Serve an aggregator until Ctrl-C.

    Ranks pass its address to ss.aggregation.attach. They must have its token: that of the
    environment variable SLIPSTREAM_AGGREGATION_TOKEN, or else a new one, which is printed.

        slipstream cluster aggregate serve --listen 10.0.0.9:4700
    """
    import os
    import signal

    from slipstream.engines.aggregation import TOKEN_VARIABLE, AggregationServer

    token = os.environ.get(TOKEN_VARIABLE)
    with AggregationServer(
        listen, token=token, slots=slots, parent=parent, members=members
    ) as server:
        print(f"aggregator at {server.address}; Ctrl-C ends it", flush=True)
        if not token:
            print(f"on every rank: export {TOKEN_VARIABLE}={server.token}", flush=True)
        signal.pause()


@app.command()
def bench(
    ranks: Annotated[int, typer.Option(help="Number of processes.", min=2)] = 4,
    size: Annotated[str, typer.Option(help="Of the tensor, float32.")] = "4MiB",
    lab: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Use hosts of a network lab with cables of this rate."),
    ] = None,
    blocks: Annotated[int, typer.Option(help="Measurements of each.", min=1)] = 9,
    as_json: Json = False,
) -> None:
    """Compare all-reduces through an aggregator with gloo's.

    All ranks are processes of this machine.

    Without --lab, ranks use the loopback interface, which has no slow cables: gloo is faster there.

        slipstream cluster aggregate bench --ranks 4 --lab 200mbit
    """
    from slipstream.cli._output import emit_result, progress
    from slipstream.engines.aggregation.measuring import compare_all_reduce
    from slipstream.units import parse_bandwidth, parse_bytes

    nbytes = int(parse_bytes(size, "size"))
    rate = None if lab is None else parse_bandwidth(lab, "lab")
    with progress("measuring") as report:
        found = compare_all_reduce(
            ranks, nbytes, lab_bytes_per_s=rate, blocks=blocks, progress=report
        )
    emit_result(found, found.table(), as_json=as_json)


@app.command()
def predict(
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="CLUSTER", help="A preset, a file or a short form.")
    ],
    jobs: Annotated[int, typer.Option(help="Number of training jobs.", min=1)] = 8,
    workers: Annotated[int, typer.Option(help="Hosts of each job, placed at random.", min=2)] = 16,
    all_reduce: Annotated[str, typer.Option(metavar="SIZE", help="Per iteration.")] = "10MB",
    compute: Annotated[str, typer.Option(metavar="TIME", help="Before the all-reduce.")] = "5ms",
    period: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Between iterations; by default the idle ring's."),
    ] = None,
    iterations: Annotated[int, typer.Option(help="Per job.", min=1)] = 2,
    load: Annotated[float, typer.Option(help="Share of host links that short flows take.")] = 0.1,
    flow: Annotated[str, typer.Option(metavar="SIZE", help="Mean of a short flow.")] = "20kB",
    trees: Annotated[int, typer.Option(help="Per job.", min=1)] = 1,
    seeds: Annotated[int, typer.Option(help="Random placements and arrivals.", min=1)] = 3,
    sizes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=N", help="Override a size, such as hosts=64."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict job times and short flows with sums in switches.

    slipstream cluster aggregate predict --cluster workers=64,link=10gbit,latency=2us --jobs 4
    """
    from slipstream.cli._output import emit_result, progress
    from slipstream.engines.aggregation.predicting import FabricLoad, predict_aggregation
    from slipstream.units import parse_bytes, parse_duration_ns

    request = FabricLoad(
        jobs, workers, parse_bytes(all_reduce, "all_reduce"), parse_duration_ns(compute, "compute"),
        iterations, None if period is None else parse_duration_ns(period, "period"), load,
        parse_bytes(flow, "flow"),
    )  # fmt: skip
    where = load_cluster(cluster, sizes)
    with progress("simulating") as report:
        found = predict_aggregation(where, request, trees=trees, seeds=seeds, progress=report)
    emit_result(found, found.table(), as_json=as_json)
