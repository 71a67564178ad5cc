"""Describe a cluster, predict the cost of collectives on it, and simulate jobs that share it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli import cluster_aggregate
from slipstream.cli._options import Json, load_cluster

if TYPE_CHECKING:
    from slipstream.cluster import Cluster, Group, Job, Queues

app = typer.Typer(
    no_args_is_help=True,
    help="Describe or measure a cluster, predict the cost of collectives on it, and simulate jobs "
    "that share it.",
    epilog="A cluster is a preset, a TOML file, or a short form such as "
    "workers=4,link=1gbit,latency=50us. Start with: slipstream cluster show",
)
app.add_typer(cluster_aggregate.app, name="aggregate")

_Cluster = Annotated[
    str, typer.Option("--cluster", metavar="CLUSTER", help="A preset, a TOML file or a short form.")
]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=N", help="Override a size, such as hosts=64."),
]


@app.command()
def show(
    cluster: Annotated[
        str | None,
        typer.Argument(help="A preset, a file or a short form; without it, list all presets."),
    ] = None,
    sizes: _Set = None,
    as_json: Json = False,
) -> None:
    """Show a cluster: devices, links, prices, and the source of each number.

    Without a name it lists the presets.

        slipstream cluster show h100x8-100gbe --set hosts=64
    """
    from slipstream.cli._output import emit, emit_result
    from slipstream.cluster import presets
    from slipstream.tables import Column, Table
    from slipstream.verbs.clusters import Description

    if cluster is None:
        listed = presets().items()
        notes = ["details of a preset: slipstream cluster show NAME"]
        table = Table([Column("preset"), Column("what it is")], list(listed), notes=notes)
        emit(table, [{"name": name, "about": about} for name, about in listed], as_json=as_json)
        return
    description = Description(load_cluster(cluster, sizes))
    emit_result(description, *description.tables(), as_json=as_json)


@app.command()
def cost(
    cluster: _Cluster,
    all_reduce: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    reduce_scatter: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    all_gather: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    broadcast: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    all_to_all: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    p2p: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    group: Annotated[
        str,
        typer.Option(help="all; devices (0-7 or 0,8); an axis of --mesh, or several (dp+tp)."),
    ] = "all",
    mesh: Annotated[
        str | None, typer.Option(metavar="AXIS=N,...", help="A grid of devices, such as dp=4,tp=8.")
    ] = None,
    algo: Annotated[
        str, typer.Option(help="auto, 2d, ring, tree, ..., or one per dimension: line*ring2.")
    ] = "auto",
    sizes: _Set = None,
    as_json: Json = False,
) -> None:
    """Predict the time of a collective on an idle cluster, for every algorithm that applies.

    slipstream cluster cost --cluster tpu-v3-multipod --all-reduce 668MB --algo 2d
    slipstream cluster cost --cluster h100x8-100gbe --all-gather 1GiB --mesh dp=4,tp=8 --group tp
    """
    from slipstream.cli._output import emit_result
    from slipstream.errors import UsageError
    from slipstream.units import parse_bytes
    from slipstream.verbs.clusters import Costs

    options = {
        "all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather,
        "broadcast": broadcast, "all_to_all": all_to_all, "p2p": p2p,
    }  # fmt: skip
    requested = {kind: size for kind, size in options.items() if size is not None}
    if len(requested) != 1:
        raise UsageError("pass exactly one collective", remedy="for example --all-reduce 668MB")
    ((kind, size),) = requested.items()
    where = load_cluster(cluster, sizes)
    members = _group(where, group, mesh)
    costs = Costs.of(where, kind, parse_bytes(size), members, algo)
    emit_result(costs, costs.table(), as_json=as_json)


@app.command()
def simulate(
    cluster: _Cluster,
    job: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUE,...",
            help="devices=0-7, compute=50ms, all_reduce=100MB, algo=ring, iterations=10, "
            "arrival=1s, priority=0, weight=1, name=text. Repeat for more jobs.",
        ),
    ],
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Perfetto trace.")
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="Simulate packets in queues of this size, not fluid flows."
        ),
    ] = None,
    mark: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Mark packets beyond this (ECN).")
    ] = None,
    sizes: _Set = None,
    as_json: Json = False,
) -> None:
    """Simulate jobs that share a cluster: in each iteration all ranks compute, then all-reduce.

        slipstream cluster simulate --cluster h100x8-100gbe \\
            --job devices=0-15,compute=80ms,all_reduce=1GB \\
            --job devices=16-31,compute=20ms,all_reduce=200MB,arrival=50ms
    """
    from slipstream.cli._output import emit_result, note
    from slipstream.cluster import simulate as run
    from slipstream.verbs.clusters import SharedRun

    where = load_cluster(cluster, sizes)
    jobs = [_job(where, text) for text in job]
    queues = _queues(queue, mark)
    if queues is None:
        timeline = run(where, jobs, explain=True)
    else:
        timeline = run(where, jobs, fidelity="packet", queues=queues)
    if perfetto is not None:
        timeline.to_perfetto(perfetto)
        note(f"wrote {perfetto}; open it at https://ui.perfetto.dev")
    shared = SharedRun(where, timeline)
    emit_result(shared, *shared.tables(), as_json=as_json)


@app.command()
def measure(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="A TOML file.")],
    ranks: Annotated[int, typer.Option(help="Number of processes that communicate.")] = 2,
    lab: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Use hosts of a network lab with cables of this rate."),
    ] = None,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Allow more ranks than CPU cores.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Time gloo between processes of this machine and write the cluster fitted to the timings.

    slipstream cluster measure --ranks 2 -o here.toml
    slipstream cluster measure --ranks 4 --lab 200mbit -o shaped.toml
    """
    from slipstream.cli._output import emit_result, need_place, note, progress
    from slipstream.ranks import calibrate
    from slipstream.units import format_percent, parse_bandwidth
    from slipstream.verbs.clusters import Description

    need_place(output, ".toml")
    rate = None if lab is None else parse_bandwidth(lab, "lab")
    with progress("measuring") as report:
        cluster = calibrate(
            ranks, lab_bytes_per_s=rate, oversubscribe=oversubscribe, progress=report
        )
    cluster.save(output)
    about = Description(cluster)
    emit_result(about, *about.tables(), as_json=as_json)
    fitted = cluster.calibration
    assert fitted is not None
    note(
        f"half of the samples are within {format_percent(fitted.residual)} of the fit, 90 % within "
        f"{format_percent(fitted.residual_p90)}; ranks per core: {fitted.oversubscription:g}"
    )
    note(f"wrote {output}")


def _group(cluster: Cluster, text: str, mesh: str | None) -> Group:
    if mesh is None:
        return cluster.all() if text == "all" else _devices(text)
    axes = _settings(mesh, None, "mesh")
    grid = cluster.mesh([_integer("mesh", size) for size in axes.values()], list(axes))
    return grid.all() if text == "all" else grid[tuple(text.split("+"))]


def _devices(text: str) -> Group:
    from slipstream.cluster import Group
    from slipstream.errors import InvalidArgumentError

    numbers: list[int] = []
    for part in text.split("+") if "+" in text else text.split(","):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise InvalidArgumentError(
                "group", f"'{part}' is not a device", remedy="0-7, 0,8 or an axis of --mesh"
            )
        numbers += range(int(low), int(high or low) + 1)
    return Group.of(numbers)


def _queues(size: str | None, mark: str | None) -> Queues | None:
    from slipstream.cluster import Queues
    from slipstream.errors import UsageError
    from slipstream.units import parse_bytes

    if size is None:
        if mark is not None:
            raise UsageError("--mark needs --queue", remedy="for example --queue 1MB --mark 100kB")
        return None
    if mark is None:
        return Queues(parse_bytes(size, "queue"))
    return Queues(parse_bytes(size, "queue"), parse_bytes(mark, "mark"))


_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
_JOB = (
    "devices", "compute", *_KINDS, "algo", "iterations", "arrival", "priority", "weight", "name",
)  # fmt: skip


def _job(cluster: Cluster, text: str) -> Job:
    from slipstream.cluster import Collective, Job, Tasks
    from slipstream.units import parse_bytes, parse_duration_ns

    settings = _settings(text, _JOB, "job setting")
    placement = _devices(settings["devices"]) if "devices" in settings else None
    ranks = cluster.devices if placement is None else placement.ranks
    tasks, before = Tasks(), []
    if "compute" in settings:
        compute_ns = parse_duration_ns(settings["compute"], "compute")
        before = [tasks.compute(rank, compute_ns) for rank in range(ranks)]
    for kind in _KINDS:
        if kind in settings:
            size = parse_bytes(settings[kind], kind)
            collective = Collective(kind, size, algo=settings.get("algo", "auto"))
            before = [tasks.communicate(collective, before)]
    return Job(
        tasks,
        iterations=_integer("iterations", settings.get("iterations", "1")),
        placement=placement,
        arrival_ns=parse_duration_ns(settings.get("arrival", "0s"), "arrival"),
        priority=_integer("priority", settings.get("priority", "0")),
        weight=_number("weight", settings.get("weight", "1")),
        name=settings.get("name", "job"),
    )


def _settings(text: str, names: tuple[str, ...] | None, kind: str) -> dict[str, str]:
    """Parse ``a=1,b=2-3,c=4``. A part without an equals sign belongs to the value before it."""
    from slipstream.errors import InvalidArgumentError, UnknownNameError

    settings: dict[str, str] = {}
    last = ""
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if equals:
            if names is not None and key not in names:
                raise UnknownNameError(kind, key, names, where=text)
            if key in settings or not value:
                raise InvalidArgumentError(kind, f"'{part}' is not a setting", where=text)
            settings[key], last = value, key
        elif last:
            settings[last] += f",{part}"
        else:
            raise InvalidArgumentError(kind, f"'{part}' is not a setting", where=text)
    return settings


def _integer(name: str, text: str) -> int:
    from slipstream.errors import InvalidArgumentError

    if not text.removeprefix("-").isdecimal():
        raise InvalidArgumentError(name, f"'{text}' is not an integer")
    return int(text)


def _number(name: str, text: str) -> float:
    from slipstream.errors import InvalidArgumentError

    try:
        return float(text)
    except ValueError:
        raise InvalidArgumentError(name, f"'{text}' is not a number") from None
