"""The recorded timeline of a launch, as a graph that the other commands read."""

from __future__ import annotations

import itertools

import numpy as np

from slipstream.engines.controller.launches import LaunchFuture
from slipstream.errors import UsageError
from slipstream.graph import PROVENANCES, Dependency, Edges, Graph, Kind, StepPhase, Tasks
from slipstream.graph.values import StringTable
from slipstream.provenance import Provenance


def launch_graph(future: LaunchFuture) -> Graph:
    """Return a launch that was traced: a lane per host, with the waits for other hosts as tasks.

    Raises:
        UsageError: the launch was not traced.
        SlipstreamError: it failed.
    """
    future.wait()
    spans = {host: found for host, found in sorted(future.spans.items()) if found}
    if not spans:
        raise UsageError(
            "the launch recorded no times", remedy="launch(program, traced=True), not on sim"
        )
    strings = StringTable()
    program, lanes = future.program, {host: at for at, host in enumerate(spans)}
    # A receiver waits within its transfer until the senders begin theirs.
    begin = {(host, node): start for host, found in spans.items() for node, start, _ in found}
    rows = []
    for host, found in spans.items():
        for node, start, end in found:
            senders = [begin[key] for other in program.nodes[node].on.hosts
                       if (key := (other, node)) in begin]  # fmt: skip
            waits = program.nodes[node].kind != "compute"
            clipped = max(start, *senders) if waits and senders else start
            rows.append((host, node, min(clipped, end), end, start))
    task_of = {(host, node): task for task, (host, node, *_) in enumerate(rows)}
    gaps = []
    for row, after in itertools.zip_longest(rows, rows[1:]):
        same = after is not None and after[0] == row[0]
        gaps.append(float(max(after[4] - row[3], 0)) if same else 0.0)
    edges: list[tuple[int, int]] = []
    producer = {value.number: at for at, node in enumerate(program.nodes) for value in node.outputs}
    for host, node, start, *_ in rows:
        for value in program.nodes[node].inputs:
            for other in lanes:
                source = task_of.get((other, producer.get(value.number, -1)))
                crosses = program.nodes[node].kind != "compute" and other != host
                if source is not None and crosses and rows[source][3] <= start:
                    edges.append((source, task_of[host, node]))
    nodes = [program.nodes[node] for _, node, *_ in rows]
    names = np.array([strings.add(node.name) for node in nodes], np.int32)
    modules = np.array([strings.add(node.on.name) for node in nodes], np.int32)
    kinds = [Kind.OP if node.kind == "compute" else Kind.COMMUNICATION for node in nodes]
    lane = np.array([lanes[host] for host, *_ in rows], np.int32)
    durations = np.array([float(end - start) for _, _, start, end, _ in rows])
    n = len(rows)
    nothing, unknown = np.zeros(n, np.int32), np.full(n, -1, np.int32)
    sources, targets = np.array(edges, np.int32).reshape(-1, 2).T
    graph = Graph(
        tasks=Tasks(
            names, nothing, modules, nothing, np.array(kinds, np.uint8),
            np.full(n, StepPhase.OTHER, np.uint8), lane, nothing, unknown,
            unknown.astype(np.int64), durations, np.array(gaps), np.zeros(n),
            np.full(n, PROVENANCES.index(Provenance.MEASURED), np.uint8),
        ),
        edges=Edges(
            sources, targets, np.full(len(edges), Dependency.COMMUNICATION, np.uint8),
            np.zeros(len(edges)), np.zeros(len(edges), np.uint8),
        ),
        strings=strings.freeze(), calls=(), operand_start=np.zeros(n + 1, np.int64),
        operands=np.empty(0, np.int32), parameters=np.empty(0, np.int32),
        lanes=tuple(f"host {host}" for host in lanes), samples=0,
        meta={"workload": program.name},
    )  # fmt: skip
    graph.check()
    return graph
