"""Import and export of MLCommons Chakra execution traces (``.et``), which ASTRA-sim reads.

A file is a sequence of length-prefixed protobuf messages: one `GlobalMetadata`, then a `Node` per
task. Chakra's integer microseconds are too coarse for operators on a CPU, so attributes hold exact
nanoseconds and all other contents of a graph, which is read back equal. Files of other tools become
graphs with one lane for each of CPU, device and network.
"""

from __future__ import annotations

import graphlib
import heapq
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import GraphError
from slipstream.files import read_bytes, replacing
from slipstream.graph.graph import Graph
from slipstream.graph.io.file import document, parts_of
from slipstream.graph.timeline import replay
from slipstream.graph.values import (
    PROVENANCES,
    Allocations,
    Dependency,
    Edges,
    Kind,
    StepPhase,
    StringTable,
    Tasks,
)
from slipstream.provenance import Provenance

# The version of Chakra's schema with our field numbers.
_VERSION = "0.0.4"
_OURS = "slipstream"
_FORMAT = 1
_NS_PER_US = 1e3
# protobuf limits messages to less than 2 GiB.
_MAX_MESSAGE_BYTES = 2**31 - 1
_MAX_VARINT_BYTES = 10
_MAX_NS = 2.0**60
_CYCLE_SHOWN = 12
_COMP, _COMM_COLL, _MEM_LOAD = 4, 7, 2
_COMM = (5, 6, 7)
_MEMORY = (2, 3)
_METADATA = 1
_NODE_TYPE = {Kind.COMMUNICATION: _COMM_COLL, Kind.COPY: _MEM_LOAD}
_HOST = (Kind.HOST, Kind.OP, Kind.LAUNCH, Kind.WAIT, Kind.COLLECTION)
# Substrings of the names of collectives, the longer first.
_COLLECTIVES = (
    ("reducescatter", 7), ("reduce_scatter", 7), ("allreduce", 0), ("all_reduce", 0),
    ("allgather", 2), ("all_gather", 2), ("alltoall", 6), ("all_to_all", 6), ("broadcast", 5),
    ("barrier", 9), ("scatter", 4), ("gather", 3), ("reduce", 1),
)  # fmt: skip
_TEXT_COLUMNS = ("name", "scope", "module", "source")
_PLAIN_COLUMNS = ("kind", "phase", "lane", "rank", "call", "sequence", "provenance")
_TIMES = ("duration_ns", "gap_ns", "spread")


def write_chakra(graph: Graph, path: Path) -> None:
    """Write `graph` atomically as a Chakra trace.

    Raises:
        GraphError: the graph has a cycle, or the file cannot be written.
    """
    data = to_chakra(graph)
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise GraphError(f"cannot be written: {error.strerror}", where=str(path)) from error


def read_chakra(path: Path) -> Graph:
    """Read the graph in a Chakra trace; a graph that slipstream wrote is read back equal.

    Raises:
        GraphError: the file is missing, truncated or not a Chakra trace, a node depends on a
            missing one, or dependencies form a cycle, which the error lists.
    """
    return from_chakra(read_bytes(path, GraphError), path.name)


def to_chakra(graph: Graph) -> bytes:
    """Encode `graph` as a Chakra trace; equal graphs give equal bytes.

    Raises:
        GraphError: the graph has a cycle.
    """
    from slipstream.graph.io._chakra_schema import GlobalMetadata, Node

    start_us = np.rint(replay(graph).start_ns / _NS_PER_US).astype(np.int64).tolist()
    metadata = GlobalMetadata(version=_VERSION)
    metadata.attr.add(name=_OURS, string_val=json.dumps(_document(graph), separators=(",", ":")))
    parts = [_framed(metadata.SerializeToString(deterministic=True))]
    columns = {name: column.tolist() for name, column in graph.tasks.columns().items()}
    incoming = _incoming(graph)
    before = _before(graph)
    for task in range(len(graph)):
        row = {name: column[task] for name, column in columns.items()}
        kind = Kind(row["kind"])
        node = Node(
            id=task,
            name=graph.strings[row["name"]],
            type=_NODE_TYPE.get(kind, _COMP),
            start_time_micros=start_us[task],
            duration_micros=round(row["duration_ns"] / _NS_PER_US),
        )
        _depend(node, graph, task, before[task], incoming)
        _describe(node, graph, row, kind)
        add = node.attr.add
        add(name="strings").int64_list.values.extend(row[name] for name in _TEXT_COLUMNS)
        add(name="columns").int64_list.values.extend(row[name] for name in _PLAIN_COLUMNS)
        add(name="times_ns").double_list.values.extend(row[name] for name in _TIMES)
        storages = graph.storages(task)
        if len(storages):
            add(name="storages").int64_list.values.extend(storages.tolist())
        parts.append(_framed(node.SerializeToString(deterministic=True)))
    return b"".join(parts)


def from_chakra(data: bytes, name: str = "trace") -> Graph:
    """Decode the graph in the bytes of a Chakra trace; see `read_chakra`."""
    from google.protobuf.message import DecodeError

    from slipstream.graph.io._chakra_schema import GlobalMetadata, Node

    messages = _messages(data, name)
    try:
        metadata = GlobalMetadata.FromString(next(messages, b""))
        nodes = [Node.FromString(message) for message in messages]
    except DecodeError as error:
        raise GraphError(
            f"a message is broken: {error}",
            where=name,
            remedy="pass an uncompressed Chakra trace (GlobalMetadata, then Nodes)",
        ) from error
    ours = [item.string_val for item in metadata.attr if item.name == _OURS]
    if not ours:
        return _foreign(nodes, metadata.version, name)
    try:
        graph = _own(json.loads(ours[0]), nodes, name)
        graph.check()
    except GraphError as error:
        raise GraphError(error.what, where=error.where or name, remedy=error.remedy) from error
    except (
        KeyError, ValueError, TypeError, AttributeError, IndexError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise GraphError(
            f"the trace is damaged: {error!r}", where=name, remedy="export it again"
        ) from error
    return graph


def _document(graph: Graph) -> dict[str, Any]:
    """Return the fields that are stored once per file."""
    return {
        "format": _FORMAT,
        **document(graph),
        "parameters": graph.parameters.tolist(),
        "memory": {name: column.tolist() for name, column in graph.memory.columns().items()},
    }


def _incoming(graph: Graph) -> dict[int, list[int]]:
    incoming: dict[int, list[int]] = {}
    for edge, target in enumerate(graph.edges.target.tolist()):
        incoming.setdefault(target, []).append(edge)
    return incoming


def _before(graph: Graph) -> list[int]:
    """Return the task before each in its lane; -1 for the first."""
    last: dict[int, int] = {}
    before = []
    for task, lane in enumerate(graph.tasks.lane.tolist()):
        before.append(last.get(lane, -1))
        last[lane] = task
    return before


def _depend(
    node: Any, graph: Graph, task: int, before: int, incoming: dict[int, list[int]]
) -> None:
    """Add dependencies in Chakra's form, and exactly as attributes."""
    edges = graph.edges
    control = {before} if before >= 0 else set()
    data: set[int] = set()
    exact: list[int] = []
    delays: list[float] = []
    for edge in incoming.get(task, ()):
        source, kind, lag = int(edges.source[edge]), int(edges.kind[edge]), int(edges.lag[edge])
        exact += [edge, source, kind, lag]
        delays.append(float(edges.delay_ns[edge]))
        # A trace is one step, so Chakra cannot represent dependencies on the step before.
        if lag == 0:
            (data if kind == Dependency.DATA else control).add(source)
    node.ctrl_deps.extend(sorted(control))
    node.data_deps.extend(sorted(data - control))
    if exact:
        node.attr.add(name="edges").int64_list.values.extend(exact)
        node.attr.add(name="delays_ns").double_list.values.extend(delays)


def _describe(node: Any, graph: Graph, row: dict[str, Any], kind: Kind) -> None:
    """Add attributes that other tools read, under their names."""
    node.attr.add(name="is_cpu_op", bool_val=kind in _HOST)
    node.attr.add(name="lane", string_val=graph.lanes[row["lane"]])
    node.attr.add(name="kind", string_val=kind.name)
    node.attr.add(name="phase", string_val=StepPhase(row["phase"]).name)
    node.attr.add(name="duration_ns", double_val=row["duration_ns"])
    if row["module"]:
        node.attr.add(name="module", string_val=graph.strings[row["module"]])
    if kind == Kind.COMMUNICATION:
        lower = node.name.lower()
        codes = [code for word, code in _COLLECTIVES if word in lower]
        if codes:
            node.attr.add(name="comm_type", int64_val=codes[0])


def _own(stored: dict[str, Any], nodes: Sequence[Any], name: str) -> Graph:
    """Return the graph of a trace that slipstream wrote."""
    if int(stored["format"]) > _FORMAT:
        raise GraphError(
            "a newer slipstream wrote this trace", where=name, remedy="upgrade slipstream"
        )
    n = len(nodes)
    columns: dict[str, NDArray[Any]] = {
        column: np.zeros(n, dtype) for column, dtype in Tasks.dtypes.items()
    }
    edges: dict[int, tuple[int, int, int, float, int]] = {}
    starts = np.zeros(n + 1, np.int64)
    storages: list[int] = []
    for task, node in enumerate(nodes):
        if node.id != task:
            raise GraphError(f"node {node.id} is out of order", where=f"{name}: node {task}")
        attributes = {item.name: item for item in node.attr}
        groups = (
            (_TEXT_COLUMNS, attributes["strings"].int64_list),
            (_PLAIN_COLUMNS, attributes["columns"].int64_list),
            (_TIMES, attributes["times_ns"].double_list),
        )
        for keys, values in groups:
            for key, value in zip(keys, values.values, strict=True):
                columns[key][task] = value
        if "edges" in attributes:
            exact = list(attributes["edges"].int64_list.values)
            delays = attributes["delays_ns"].double_list.values
            for at, delay in zip(range(0, len(exact), 4), delays, strict=True):
                number, source, kind, lag = exact[at : at + 4]
                edges[number] = (source, task, kind, delay, lag)
        if "storages" in attributes:
            storages += attributes["storages"].int64_list.values
        starts[task + 1] = len(storages)
    if sorted(edges) != list(range(len(edges))):
        raise GraphError("dependencies are missing", where=name, remedy="export it again")
    rows = [edges[number] for number in range(len(edges))]
    # Older files lack memory.
    memory = stored.get("memory", {name: [] for name in Allocations.dtypes})
    graph = Graph(
        tasks=Tasks(**columns),
        edges=Edges.of(*zip(*rows, strict=True)) if rows else Edges.none(),
        operand_start=starts,
        operands=np.array(storages, np.int32),
        parameters=np.array(stored["parameters"], np.int32),
        memory=Allocations.of(*(memory[name] for name in Allocations.dtypes)),
        **parts_of(stored),
    )
    # Another tool may have changed the node's name.
    for task, node in enumerate(nodes):
        if graph.task(task).name != node.name:
            raise GraphError(f"the name of node {task} was changed to '{node.name}'", where=name)
    return graph


def _foreign(nodes: Sequence[Any], version: str, name: str) -> Graph:
    """Return the graph of a trace that another tool wrote."""
    nodes = [node for node in nodes if node.type != _METADATA]
    if not nodes:
        raise GraphError("the trace has no nodes", where=name, remedy="record at least one step")
    order = _order(nodes, name)
    strings = StringTable()
    lane_names: dict[str, int] = {}
    rows: dict[str, list[Any]] = {key: [] for key in ("name", "kind", "lane", "duration_ns")}
    position = {nodes[at].id: place for place, at in enumerate(order)}
    edges: list[tuple[int, int, int, float, int]] = []
    untimed = 0
    for place, at in enumerate(order):
        node = nodes[at]
        attributes = {item.name: item for item in node.attr}
        kind, lane = _placed(node, attributes)
        duration = _duration_ns(node, attributes, name)
        untimed += duration == 0
        rows["name"].append(strings.add(node.name))
        rows["kind"].append(int(kind))
        rows["lane"].append(lane_names.setdefault(lane, len(lane_names)))
        rows["duration_ns"].append(duration)
        data = set(node.data_deps)
        for dependency in sorted({*node.ctrl_deps, *data}):
            source = position[dependency]
            if rows["lane"][source] == rows["lane"][place]:
                continue
            communicates = Kind.COMMUNICATION in (rows["kind"][source], kind)
            between = Dependency.COMMUNICATION if communicates else Dependency.THREAD_TO_THREAD
            code = Dependency.DATA if dependency in data and not communicates else between
            edges.append((source, place, int(code), 0.0, 0))
    n = len(order)
    columns = {key: np.zeros(n, dtype) for key, dtype in Tasks.dtypes.items()}
    columns.update({key: np.array(rows[key], Tasks.dtypes[key]) for key in rows})
    columns["call"][:] = columns["sequence"][:] = -1
    columns["provenance"][:] = PROVENANCES.index(Provenance.MEASURED)
    graph = Graph(
        tasks=Tasks(**columns),
        edges=Edges.of(*zip(*edges, strict=True)) if edges else Edges.none(),
        strings=strings.freeze(),
        calls=(),
        operand_start=np.zeros(n + 1, np.int64),
        operands=np.empty(0, np.int32),
        parameters=np.empty(0, np.int32),
        lanes=tuple(lane_names),
        samples=0,
        meta={
            "workload": name, "origin": "chakra", "chakra_version": version,
            "untimed_tasks": untimed,
        },
    )  # fmt: skip
    graph.check()
    return graph


def _placed(node: Any, attributes: dict[str, Any]) -> tuple[Kind, str]:
    """Return the kind and lane of another tool's node."""
    if node.type in _COMM:
        return Kind.COMMUNICATION, "network"
    if "is_cpu_op" in attributes and attributes["is_cpu_op"].bool_val:
        return Kind.OP, "cpu"
    return (Kind.COPY if node.type in _MEMORY else Kind.KERNEL), "device"


def _duration_ns(node: Any, attributes: dict[str, Any], name: str) -> float:
    exact = attributes.get("duration_ns")
    duration = node.duration_micros * _NS_PER_US
    if exact is not None and exact.WhichOneof("value") == "double_val":
        duration = exact.double_val
    if not 0 <= duration <= _MAX_NS:
        raise GraphError(
            f"the duration is {duration} ns", where=f"{name}: node {node.id} ({node.name})"
        )
    return float(duration)


def _order(nodes: Sequence[Any], name: str) -> list[int]:
    """Return a topological order of nodes, with ties by start and id."""
    index: dict[int, int] = {}
    for at, node in enumerate(nodes):
        if node.id in index:
            raise GraphError(f"two nodes have the id {node.id}", where=name)
        index[node.id] = at
    waiting: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
    for at, node in enumerate(nodes):
        dependencies = {*node.ctrl_deps, *node.data_deps}
        if missing := sorted(dependencies.difference(index)):
            raise GraphError(
                f"node {node.id} ({node.name}) depends on node {missing[0]}, which is missing",
                where=name,
                remedy="export the whole trace",
            )
        waiting.add(at, *(index[dependency] for dependency in dependencies))
    try:
        waiting.prepare()
    except graphlib.CycleError as error:
        # Each node is followed by one that waits for it; the last is the first again.
        raise _cycle([nodes[at] for at in error.args[1][:-1]], name) from None
    ready: list[tuple[int, int, int]] = []
    order = []
    while waiting.is_active():
        for at in waiting.get_ready():
            heapq.heappush(ready, (nodes[at].start_time_micros, nodes[at].id, at))
        order.append(heapq.heappop(ready)[2])
        waiting.done(order[-1])
    return order


def _cycle(cycle: Sequence[Any], name: str) -> GraphError:
    shown = [f"{node.id} ({node.name})" for node in cycle[:_CYCLE_SHOWN]]
    shown.append(shown[0] if len(cycle) <= _CYCLE_SHOWN else "...")
    return GraphError(
        "dependencies form a cycle: " + " -> ".join(shown),
        where=f"{name}: {len(cycle)} nodes",
        remedy="remove one of these dependencies",
    )


def _framed(message: bytes) -> bytes:
    """Return the message with its length as a prefix."""
    length, head = len(message), bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + message


def _messages(data: bytes, name: str) -> Iterator[bytes]:
    """Yield the messages of a file."""
    at, number = 0, 0
    while at < len(data):
        length, shift, begin = 0, 0, at
        while True:
            if at >= len(data) or at - begin >= _MAX_VARINT_BYTES:
                raise _cut(name, number, begin)
            byte = data[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if length > min(_MAX_MESSAGE_BYTES, len(data) - at):
            raise _cut(name, number, begin)
        yield data[at : at + length]
        at += length
        number += 1


def _cut(name: str, number: int, at: int) -> GraphError:
    return GraphError(
        f"the file is truncated or not a Chakra trace: message {number} has no end",
        where=f"{name}: byte {at}",
        remedy="export it again, or decompress it first",
    )
