"""``slipstream import``: convert traces of other tools to graphs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from slipstream.cli._options import Json
from slipstream.cli._output import emit, note, progress
from slipstream.errors import UsageError
from slipstream.tables import Column, Table
from slipstream.units import format_duration

if TYPE_CHECKING:
    from slipstream.graph import Graph


def command(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="A torch.profiler trace (.json, .json.gz), or a Chakra trace (.et).",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="By default the trace's name with .slipgraph."
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="N of ProfilerStep#N, or all; by default the step of median duration.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a trace to a graph, recorded here or elsewhere, with or without a GPU.

    `explain`, `predict`, `diff` and `export` read the graph. If you can, record traces with
    `_ExperimentalConfig(enable_cuda_sync_events=True)`: it records which kernel a synchronisation
    waited for, which otherwise has to be guessed.

        slipstream import rank0.pt.trace.json.gz -o run.slipgraph
    """
    from slipstream.graph import read_chakra, read_kineto, replay, save

    step_number = _step(step)
    target = output or trace.with_name(trace.name.split(".")[0] + ".slipgraph")
    with progress("importing") as report:
        report(f"reading {trace.name}")
        graph = read_chakra(trace) if trace.suffix == ".et" else read_kineto(trace, step_number)
        step_ns = replay(graph).step_ns
        save(graph, target)
    payload = _payload(graph, step_ns, target)
    row = {
        "file": target, "step": payload["step"], "tasks": len(graph), "lanes": len(graph.lanes),
        "edges": len(graph.edges), "kernels": payload["kernels"], "time": format_duration(step_ns),
    }  # fmt: skip
    columns = [Column(name, "left" if name in ("file", "step") else "right") for name in row]
    emit(Table(columns, [tuple(row.values())]), payload, as_json=as_json)
    for line in _warnings(graph, step_ns):
        note(line)


def _step(text: str | None) -> int | Literal["all"] | None:
    if text is None:
        return None
    if text == "all":
        return "all"
    if not text.isdecimal():
        raise UsageError(f"'{text}' is not a step number", remedy="--step 12 or --step all")
    return int(text)


def _payload(graph: Graph, step_ns: float, target: Path) -> dict[str, Any]:
    counts = (
        "kernels", "kernels_linked", "edges_dropped", "waits_unresolved", "untimed_tasks",
    )  # fmt: skip
    return {
        "file": str(target),
        "origin": graph.meta.get("origin"),
        "step": graph.meta.get("step", "all"),
        "tasks": len(graph),
        "edges": len(graph.edges),
        "lanes": list(graph.lanes),
        "step_ns": step_ns,
        "recorded_ns": graph.meta.get("recorded_ns"),
        **{name: graph.meta.get(name, 0) for name in counts},
    }


# Beyond this, the step fills or drains the launch queue: its recorded length is not steady state.
_MAX_DRIFT = 0.02


def _warnings(graph: Graph, step_ns: float) -> list[str]:
    """Return caveats about the numbers of an imported graph."""
    meta, lines = graph.meta, []
    if meta.get("untimed_tasks"):
        lines.append(f"{meta['untimed_tasks']} tasks have no duration in the trace and take 0 ns")
    if meta.get("waits_unresolved"):
        lines.append(f"it is unknown what {meta['waits_unresolved']} synchronisations waited for")
    lost = meta.get("kernels", 0) - meta.get("kernels_linked", 0)
    lost -= meta.get("kernels_launched_before", 0)
    if lost:
        lines.append(f"the trace lacks the launches of {lost} kernels, which start immediately")
    recorded = float(meta.get("recorded_ns") or 0.0)
    if recorded and abs(step_ns / recorded - 1) > _MAX_DRIFT:
        lines.append(
            f"the recorded step took {format_duration(recorded)}, but in steady state it "
            f"takes {format_duration(step_ns)}, because the device lagged behind or caught up"
        )
    return lines
