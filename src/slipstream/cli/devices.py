"""``slipstream devices``: would another device be worth it?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli._workload import Json, ScriptArguments, Set, Steps, Target, Threads, Timeout

if TYPE_CHECKING:
    from slipstream.graph import Graph
    from slipstream.tables import Table
    from slipstream.verbs.devices.elsewhere import OnDevice

_KNOWN = {"microbenchmark": "measured here", "datasheet": "data sheet"}


def command(
    workload: Target,
    script_arguments: ScriptArguments = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="avx2, sse4.1, threads:2, h100, ...; repeatable. All that are known, if none.",
        ),
    ] = None,
    settings: Set = None,
    threads: Threads = 0,
    steps: Steps = 24,
    timeout: Timeout = "5min",
    as_json: Json = False,
) -> None:
    """The recorded step on other devices, by time per sample and by cost.

    This processor with an older instruction set or more threads is measured, operator by operator,
    once per machine. GPUs and other processors are known by their data sheets.

        slipstream devices run.slipgraph

        slipstream devices run.slipgraph --device avx2 --device h100
    """
    from slipstream.cli._output import emit, progress
    from slipstream.cli._workload import graph_of
    from slipstream.verbs.devices.elsewhere import devices_for, ordered, predict_device

    with progress("devices") as say:
        graph = graph_of(
            workload, script_arguments, settings,
            threads=threads, steps=steps, timeout=timeout, say=say,
        )  # fmt: skip
        found = []
        for name in device or devices_for(graph):
            say(name)
            found.append(predict_device(graph, name, say=partial(_say_of, say, name)))
    rows = ordered(found)
    emit(_tables(graph, rows), [one.to_json() for one in rows], as_json=as_json)


def _tables(graph: Graph, found: Sequence[OnDevice]) -> list[Table]:
    from slipstream.graph import replay
    from slipstream.tables import Column, Table
    from slipstream.units import format_duration, format_reach

    told = [one for one in found if one.prediction.why_not is None]
    per = "sample" if graph.samples else "step"
    priced = [one for one in told if one.dollars_per_million is not None]
    columns = [
        Column("device"), Column("step", "right"), Column(f"per {per}", "right"),
        Column("faster", "right"), Column("90 % interval", "right"), Column("known from"),
    ]  # fmt: skip
    if priced:
        columns.append(Column(f"$ a million {per}s", "right"))
    rows = []
    for one in told:
        p = one.prediction
        row = [
            one.device, format_duration(p.step_ns), format_duration(one.sample_ns),
            f"{p.speedup:.2f}x", format_reach(p.speedup, 1 / p.high, 1 / p.low),
            _KNOWN.get(str(one.known), str(one.known)),
        ]  # fmt: skip
        if priced:
            cost = one.dollars_per_million
            row.append("-" if cost is None else f"{cost:.3g}")
        rows.append(tuple(row))
    step_ns = replay(graph).step_ns
    where = graph.meta.get("device_name") or graph.meta.get("cpu_capability") or "here"
    notes = [f"as recorded ({where}): {format_duration(step_ns)} per step"]
    if priced:
        cheapest = min(priced, key=lambda one: one.dollars_per_million or math.inf)
        notes.append(f"cheapest per {per} where prices are known: {cheapest.device}")
    notes += [f"{one.device}: {one.prediction.why_not}" for one in found if one not in told]
    if any(str(one.known) == "datasheet" for one in told):
        notes.append("data sheets tell limits, not kernels: such a row is a first guess")
    title = f"{graph.meta.get('workload', 'this step')} on other devices"
    return [Table(columns, rows, title=title, notes=notes)]


def _say_of(say: Callable[[str], None], name: str, line: str) -> None:
    say(f"{name}: {line}")
