"""Describe a cluster; ask what a collective costs on it, and what happens when jobs share it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli._options import load_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from slipstream.cluster import Cluster, Group, Job, Quantity, Queues, Timeline
    from slipstream.tables import Table

app = typer.Typer(
    no_args_is_help=True,
    help="Describe or measure a cluster; what a collective costs on it; what happens when jobs "
    "share it.",
    epilog="A cluster is a preset, a TOML file, or in short workers=4,link=1gbit,latency=50us. "
    "Start with: slipstream cluster show",
)

_Json = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]
_On = Annotated[
    str, typer.Option("--on", metavar="CLUSTER", help="A preset, a TOML file or a short form.")
]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=N", help="Another size of a preset, as hosts=64."),
]


@app.command()
def show(
    cluster: Annotated[
        str | None,
        typer.Argument(help="A preset, a file, a short form; without it, all presets."),
    ] = None,
    sizes: _Set = None,
    as_json: _Json = False,
) -> None:
    """Show a cluster: devices, links, prices, and where each number is from.

    Without a name it lists the clusters that ship with slipstream.

        slipstream cluster show h100x8-100gbe --set hosts=64
    """
    from slipstream.cli._output import emit
    from slipstream.cluster import presets
    from slipstream.tables import Column, Table

    if cluster is None:
        known = presets()
        table = Table(
            [Column("preset"), Column("what it is")],
            list(known.items()),
            notes=["one of them: slipstream cluster show NAME"],
        )
        emit(table, [{"name": name, "about": about} for name, about in known.items()],
             as_json=as_json)  # fmt: skip
        return
    found = load_cluster(cluster, sizes)
    tables, payload = _describe(found)
    emit(tables, payload, as_json=as_json)


@app.command()
def cost(
    on: _On,
    all_reduce: Annotated[str | None, typer.Option("--all-reduce", metavar="SIZE")] = None,
    reduce_scatter: Annotated[str | None, typer.Option("--reduce-scatter", metavar="SIZE")] = None,
    all_gather: Annotated[str | None, typer.Option("--all-gather", metavar="SIZE")] = None,
    broadcast: Annotated[str | None, typer.Option("--broadcast", metavar="SIZE")] = None,
    all_to_all: Annotated[str | None, typer.Option("--all-to-all", metavar="SIZE")] = None,
    p2p: Annotated[str | None, typer.Option("--p2p", metavar="SIZE")] = None,
    group: Annotated[
        str,
        typer.Option(help="all; devices as 0-7 or 0,8; an axis of --mesh, or several as dp+tp."),
    ] = "all",
    mesh: Annotated[
        str | None, typer.Option(metavar="AXIS=N,...", help="A grid of devices, as dp=4,tp=8.")
    ] = None,
    algo: Annotated[
        str, typer.Option(help="auto, 2d, ring, tree, ..., or one a dimension: line*ring2.")
    ] = "auto",
    sizes: _Set = None,
    as_json: _Json = False,
) -> None:
    """What a collective costs when nothing else is going on, for every algorithm that fits.

    slipstream cluster cost --on tpu-v3-multipod --all-reduce 668MB --algo 2d
    slipstream cluster cost --on h100x8-100gbe --all-gather 1GiB --mesh dp=4,tp=8 --group tp
    """
    from slipstream.cli._output import emit
    from slipstream.cluster import Collective
    from slipstream.errors import UsageError
    from slipstream.tables import Column, Table
    from slipstream.units import format_bytes, format_duration, parse_bytes

    asked = {
        "all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather,
        "broadcast": broadcast, "all_to_all": all_to_all, "p2p": p2p,
    }  # fmt: skip
    given = {kind: size for kind, size in asked.items() if size is not None}
    if len(given) != 1:
        raise UsageError("one collective is needed", remedy="--all-reduce 668MB")
    kind, size = next(iter(given.items()))
    found = load_cluster(on, sizes)
    members = _group(found, group, mesh)
    wanted = Collective(kind, parse_bytes(size), members, algo)
    names = found.algorithms(wanted, members)
    costs = sorted(
        (found.cost(Collective(kind, wanted.nbytes, members, name)) for name in names),
        key=lambda one: one.duration_ns,
    )
    table = Table(
        [
            Column("algorithm"), Column("time", "right"), Column("of it latency", "right"),
            Column("sent per rank", "right"), Column("slowest link"),
        ],
        [
            (c.algo, format_duration(c.duration_ns), format_duration(c.latency_ns),
             format_bytes(c.bytes_per_rank), c.bottleneck)
            for c in costs
        ],
        title=f"{kind} of {format_bytes(wanted.nbytes)} over {members.ranks} ranks"
        + (f", {members.rows} groups at the same time" if members.rows > 1 else ""),
        notes=[_basis(found), *_interval(costs[0].interval)],
    )  # fmt: skip
    payload = {
        "kind": kind, "nbytes": wanted.nbytes, "ranks": members.ranks, "groups": members.rows,
        "provenance": found.provenance,
        "costs": [
            {
                "algo": c.algo, "duration_ns": c.duration_ns, "latency_ns": c.latency_ns,
                "bytes_per_rank": c.bytes_per_rank, "bottleneck": c.bottleneck,
                "interval": c.interval,
            }
            for c in costs
        ],
    }  # fmt: skip
    emit(table, payload, as_json=as_json)


@app.command()
def simulate(
    on: _On,
    job: Annotated[
        list[str],
        typer.Option(
            "--job",
            metavar="KEY=VALUE,...",
            help="devices=0-7, compute=50ms, all_reduce=100MB, algo=ring, iterations=10, "
            "arrival=1s, priority=0, weight=1, name=text. Repeat it for more jobs.",
        ),
    ],
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", metavar="FILE", help="Write a trace to look at.")
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue", metavar="BYTES", help="Packets that wait in queues of this size, not fluids."
        ),
    ] = None,
    mark: Annotated[
        str | None, typer.Option("--mark", metavar="BYTES", help="Packets beyond are marked (ECN).")
    ] = None,
    sizes: _Set = None,
    as_json: _Json = False,
) -> None:
    """Run jobs that share a cluster: every rank computes, then all reduce, again and again.

        slipstream cluster simulate --on h100x8-100gbe \\
            --job devices=0-15,compute=80ms,all_reduce=1GB \\
            --job devices=16-31,compute=20ms,all_reduce=200MB,arrival=50ms
    """
    from slipstream.cli._output import emit, note
    from slipstream.cluster import simulate as run

    found = load_cluster(on, sizes)
    jobs = [_job(found, text) for text in job]
    queues = _queues(queue, mark)
    if queues is None:
        timeline = run(found, jobs, explain=True)
    else:
        timeline = run(found, jobs, fidelity="packet", queues=queues)
    if perfetto is not None:
        timeline.to_perfetto(perfetto)
        note(f"written: {perfetto}; open it at https://ui.perfetto.dev")
    tables, payload = _timeline(found, timeline)
    emit(tables, payload, as_json=as_json)


@app.command()
def measure(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="A TOML file.")],
    ranks: Annotated[int, typer.Option(help="How many processes communicate.")] = 2,
    lab: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="On hosts of a network lab with cables of this rate."),
    ] = None,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Allow more ranks than processor cores.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Time gloo between processes of this machine and write the cluster that explains it.

    slipstream cluster measure --ranks 2 -o here.toml
    slipstream cluster measure --ranks 4 --lab 200mbit -o shaped.toml
    """
    from slipstream.cli._output import emit, need_place, note, progress
    from slipstream.ranks import calibrate
    from slipstream.units import format_percent, parse_bandwidth

    need_place(output, ".toml")
    rate = None if lab is None else parse_bandwidth(lab, "lab")
    with progress("measuring") as say:
        found = calibrate(ranks, lab_bytes_per_s=rate, oversubscribe=oversubscribe, progress=say)
    found.save(output)
    tables, payload = _describe(found)
    emit(tables, payload, as_json=as_json)
    fitted = found.calibration
    assert fitted is not None
    note(
        f"half of the samples lie within {format_percent(fitted.residual)} of the fit, nine of ten "
        f"within {format_percent(fitted.residual_p90)}; ranks a core: {fitted.oversubscription:g}"
    )
    note(f"written: {output}")


# ---- words into objects ----------------------------------------------------------------------


def _group(cluster: Cluster, text: str, mesh: str | None) -> Group:
    if mesh is None:
        return cluster.all() if text == "all" else _devices(text)
    axes = _settings(mesh, None, "mesh")
    made = cluster.mesh([_whole("mesh", size) for size in axes.values()], list(axes))
    return made.all() if text == "all" else made[tuple(text.split("+"))]


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


def _queues(room: str | None, mark: str | None) -> Queues | None:
    from slipstream.cluster import Queues
    from slipstream.errors import UsageError
    from slipstream.units import parse_bytes

    if room is None:
        if mark is not None:
            raise UsageError("--mark is for packets", remedy="--queue 1MB --mark 100kB")
        return None
    if mark is None:
        return Queues(parse_bytes(room, "queue"))
    return Queues(parse_bytes(room, "queue"), parse_bytes(mark, "mark"))


_JOB = (
    "devices", "compute", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all",
    "algo", "iterations", "arrival", "priority", "weight", "name",
)  # fmt: skip
_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


def _job(cluster: Cluster, text: str) -> Job:
    from slipstream.cluster import Collective, Job, Tasks
    from slipstream.units import parse_bytes, parse_duration_ns

    given = _settings(text, _JOB, "job setting")
    placement = _devices(given["devices"]) if "devices" in given else None
    ranks = cluster.devices if placement is None else placement.ranks
    tasks, before = Tasks(), []
    if "compute" in given:
        busy = parse_duration_ns(given["compute"], "compute")
        before = [tasks.compute(rank, busy) for rank in range(ranks)]
    for kind in _KINDS:
        if kind in given:
            size = parse_bytes(given[kind], kind)
            wanted = Collective(kind, size, algo=given.get("algo", "auto"))
            before = [tasks.communicate(wanted, before)]
    return Job(
        tasks,
        iterations=_whole("iterations", given.get("iterations", "1")),
        placement=placement,
        arrival_ns=parse_duration_ns(given.get("arrival", "0s"), "arrival"),
        priority=_whole("priority", given.get("priority", "0")),
        weight=_number("weight", given.get("weight", "1")),
        name=given.get("name", "job"),
    )


def _settings(text: str, known: tuple[str, ...] | None, kind: str) -> dict[str, str]:
    """``a=1,b=2-3,c=4``; what has no sign of equality belongs to the value before it."""
    from slipstream.errors import InvalidArgumentError, UnknownNameError

    found: dict[str, str] = {}
    last = ""
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if equals:
            if known is not None and key not in known:
                raise UnknownNameError(kind, key, known, where=text)
            if key in found or not value:
                raise InvalidArgumentError(kind, f"'{part}' is not a setting", where=text)
            found[key], last = value, key
        elif last:
            found[last] += f",{part}"
        else:
            raise InvalidArgumentError(kind, f"'{part}' is not a setting", where=text)
    return found


def _whole(name: str, text: str) -> int:
    from slipstream.errors import InvalidArgumentError

    if not text.removeprefix("-").isdecimal():
        raise InvalidArgumentError(name, f"'{text}' is not a whole number")
    return int(text)


def _number(name: str, text: str) -> float:
    from slipstream.errors import InvalidArgumentError

    try:
        return float(text)
    except ValueError:
        raise InvalidArgumentError(name, f"'{text}' is not a number") from None


# ---- objects into tables ---------------------------------------------------------------------


def _basis(cluster: Cluster) -> str:
    if cluster.calibration is not None:
        return f"links: measured {cluster.calibration.date}"
    return f"links: {cluster.provenance.value} (slipstream cluster show has every number's source)"


def _interval(interval: Any) -> list[str]:
    from slipstream.units import format_duration

    if interval is None:
        return []
    low, high = format_duration(interval.low_ns), format_duration(interval.high_ns)
    return [f"nine of ten measurements lay within {low} to {high} of such a figure"]


def _describe(cluster: Cluster) -> tuple[list[Table], Mapping[str, Any]]:
    import numpy as np

    from slipstream.tables import Column, Table
    from slipstream.units import format_bytes, format_duration, format_percent

    topology, device, price = cluster.topology, cluster.device, cluster.price_per_hour
    counts = np.bincount(topology.link_kind, minlength=len(topology.link_kinds))
    rows: list[tuple[object, ...]] = [
        ("network", topology.generator, "", ""),
        ("devices", topology.devices, "", device.about if device else ""),
        ("hosts", topology.hosts, "", ""),
        _row("start-up of a message", cluster.alpha_ns, format_duration),
        _row("to add up a byte", cluster.reduce_ns_per_byte, format_duration),
        _row("slowdown beside messages", cluster.overlap_penalty, format_percent),
    ]
    rows += [
        (
            f"messages from {format_bytes(one.from_bytes)} on",
            format_duration(one.alpha_ns), "", f"a byte: {one.slowdown:.3g} times the links' time",
        )
        for one in cluster.regimes
    ]  # fmt: skip
    if device is not None:
        if device.price_per_hour is not None:
            each = device.price_per_hour
            rows.append(_row("price", each, lambda one: f"{one * topology.devices:,.2f} $/h"))
        for dtype, rate in device.flops.items():
            rows.append(_row(f"peak {dtype}", rate, lambda one: f"{one / 1e12:.4g} TFLOP/s"))
        for name, number, unit in (
            ("memory", device.memory_bytes, ""),
            ("memory rate", device.memory_bytes_per_s, "/s"),
        ):
            if number is not None:
                rows.append(_row(name, number, functools.partial(_bytes, unit)))
    about = Table(
        [
            Column(cluster.name),
            Column("", "right"),
            Column("known by"),
            Column("source", optional=True),
        ],
        rows,
        title=cluster.about,
    )
    kinds = list(zip(topology.link_kinds, counts.tolist(), strict=True))
    links = Table(
        [
            Column("links"),
            Column("how many", "right"),
            Column("each way", "right"),
            Column("latency", "right"),
            Column("known by"),
            Column("source", optional=True),
        ],
        [
            (
                kind.name,
                count,
                f"{kind.bytes_per_s.value / 1e9:.4g} GB/s",
                format_duration(kind.latency_ns.value),
                kind.bytes_per_s.provenance.value,
                kind.bytes_per_s.source,
            )
            for kind, count in kinds
        ],
        notes=["a cable is two links, one each way; GB = 10^9 bytes"],
    )
    payload = {
        "name": cluster.name,
        "about": cluster.about,
        "generator": topology.generator,
        "devices": topology.devices,
        "hosts": topology.hosts,
        "device": device,
        "price_per_hour": price,
        "alpha_ns": cluster.alpha_ns,
        "reduce_ns_per_byte": cluster.reduce_ns_per_byte,
        "regimes": cluster.regimes,
        "links": [
            {
                "kind": kind.name,
                "count": count,
                "bytes_per_s": kind.bytes_per_s,
                "latency_ns": kind.latency_ns,
            }
            for kind, count in kinds
        ],
        "calibration": cluster.calibration,
    }
    return [about, links], payload


def _bytes(unit: str, count: float) -> str:
    from slipstream.units import format_bytes

    return format_bytes(count) + unit


def _row(name: str, number: Quantity, shown: Callable[[float], str]) -> tuple[object, ...]:
    return name, shown(number.value), number.provenance.value, number.source


def _timeline(cluster: Cluster, timeline: Timeline) -> tuple[list[Table], Mapping[str, Any]]:
    import numpy as np

    from slipstream.tables import Column, Table
    from slipstream.units import format_duration, format_percent

    rows, jobs = [], []
    for number, job in enumerate(timeline.jobs):
        one = timeline.job(number)
        held = [] if timeline.queues else timeline.bottlenecks(number)
        exposed = sum(
            float(np.median(one.exposed_ns(t)))
            for t, task in enumerate(job.tasks.tasks) if task.collective is not None
        )  # fmt: skip
        median = float(np.median(one.iteration_ns))
        worst = f"{held[0].name} ({format_percent(held[0].share)})" if held else "-"
        rows.append((f"{number} {job.name}", job.iterations, format_duration(median),
                     format_duration(float(one.iteration_ns.max())), format_duration(exposed),
                     format_duration(float(one.iteration_end_ns[-1])), worst))  # fmt: skip
        jobs.append({
            "name": job.name, "iteration_ns": one.iteration_ns, "end_ns": one.iteration_end_ns[-1],
            "exposed_ns": exposed, "bottlenecks": held[:10],
        })  # fmt: skip
    used = timeline.link_utilisation()
    busiest = np.argsort(-used, kind="stable")[:10]
    table = Table(
        [Column("job"), Column("iterations", "right"), Column("iteration, median", "right"),
         Column("longest", "right"), Column("exposed", "right"), Column("end", "right"),
         Column("held up most by (of its transfers' time)", optional=True)],
        rows,
        notes=[_basis(cluster), _transfers(timeline)],
    )  # fmt: skip
    links = Table(
        [Column("busiest links"), Column("used", "right"), Column("GB", "right")],
        [
            (cluster.topology.link_name(int(link)), format_percent(float(used[link])),
             f"{timeline.link_bytes[link] / 1e9:.4g}")
            for link in busiest if used[link] > 0.0
        ],
    )  # fmt: skip
    payload = {
        "makespan_ns": timeline.makespan_ns, "provenance": timeline.provenance, "jobs": jobs,
        "links": [
            {"name": cluster.topology.link_name(int(link)), "utilisation": used[link],
             "bytes": timeline.link_bytes[link]}
            for link in busiest
        ],
    }  # fmt: skip
    if timeline.queues is not None:
        payload["queues"] = {
            "peak_bytes": timeline.queues.peak_bytes.max(),
            "dropped": timeline.queues.dropped.sum(), "marked": timeline.queues.marked.sum(),
            "sent_again": timeline.queues.sent_again.sum(),
        }  # fmt: skip
    return [table, links], payload


def _transfers(timeline: Timeline) -> str:
    from slipstream.units import format_bytes

    found = timeline.queues
    if found is None:
        return "fluid transfers: says nothing about queues and tail latencies"
    return (
        f"packets: {found.dropped.sum()} dropped, {found.marked.sum()} marked, "
        f"{found.sent_again.sum()} sent again; up to "
        f"{format_bytes(float(found.peak_bytes.max()))} waited"
    )
