"""Read PyTorch's execution trace: schema, arguments, storages and parent of every operator."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.errors import GraphError
from slipstream.graph.call import Call, TensorSpec

_THREAD_ROOT = "[pytorch|profiler|execution_trace|thread]"
_PROCESS_ROOT = "[pytorch|profiler|execution_trace|process]"
# Torch dtypes by the c10 type names in a trace.
_DTYPES = {
    "float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16",
    "long int": "int64", "int": "int32", "short int": "int16", "signed char": "int8",
    "unsigned char": "uint8", "bool": "bool", "long": "int64", "short": "int16", "char": "int8",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
    "BFloat16": "bfloat16", "Half": "float16", "byte": "uint8",
}  # fmt: skip
# Annotations of work on another thread (communication started on this one), or added by the trace
# itself; the profiler has none of them among this thread's events.
_ELSEWHERE = ("## process_group:init ##", "gloo:", "nccl:", "mpi:", "ucc:")
_NO_TENSOR = 0
_NO_ROOT = -1
AUTOGRAD = "autograd::engine::evaluate_function: "
"""Prefix of the annotation of a node that autograd's engine evaluates."""
PARAMETERS = "slipstream::parameters"
"""Annotation under which a capture touches the model's parameters, before the step."""


@dataclass
class Node:
    """One operator or annotation of the trace.

    Attributes:
        parent: Index of the enclosing node, -1 at the top.
        sequence: Autograd's sequence number, -1 for none.
        call: The call, or None for annotations and calls with unknown arguments.
        storages: Ids of the storages of `call`'s inputs, then outputs.
    """

    name: str
    parent: int
    sequence: int
    call: Call | None
    storages: tuple[int, ...]


@contextlib.contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Write an execution trace of the body to `path`."""
    import torch

    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
    try:
        observer.start()
        yield
        observer.stop()
    finally:
        # Also stops the observer if the step failed.
        observer.unregister_callback()


def read_trace(path: Path) -> list[Node]:
    """Return the nodes of an execution trace in pre-order.

    Raises:
        GraphError: The file is missing, truncated, or not an execution trace.
    """
    try:
        return _nodes(json.loads(path.read_bytes())["nodes"])
    except FileNotFoundError:
        raise GraphError("the execution trace was not written", where=path.name) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise GraphError(
            f"not a complete execution trace: {type(error).__name__}: {error}",
            where=path.name,
            remedy="profile again",
        ) from error


def _nodes(rows: Sequence[Mapping[str, Any]]) -> list[Node]:
    rows = _of_one_thread(sorted(rows, key=lambda row: row["id"]))
    nodes: list[Node] = []
    index: dict[int, int] = {}
    # Nodes of autograd's engine in which an error ended operators, and those of them that are over.
    # The trace takes many later nodes for parts of them.
    interrupted: set[int] = set()
    over: set[int] = set()
    for row in rows:
        if row["name"].startswith((_THREAD_ROOT, _PROCESS_ROOT)):
            continue
        above = row["ctrl_deps"]
        if above not in index:
            index[above] = _around(above, index, nodes)
            interrupted.add(_engine_node(index[above], nodes))
            interrupted.discard(-1)
        place = _outside(index[above], over, nodes)
        if row["name"].startswith(_ELSEWHERE):
            index[row["id"]] = place
            continue
        if row["name"].startswith(AUTOGRAD):
            # The engine evaluates one node after another.
            over |= {_engine_node(place, nodes)} & interrupted
            place = _outside(place, over, nodes)
        index[row["id"]] = len(nodes)
        nodes.append(_node(row, place))
    return nodes


def _of_one_thread(rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of the thread that ran the step, since others are not in its order.

    It is the thread that touched the parameters, else the one with the most rows.
    """
    root: dict[int, int] = {}
    for row in rows:
        begins = row["name"].startswith(_THREAD_ROOT)
        root[row["id"]] = row["id"] if begins else root.get(row["ctrl_deps"], _NO_ROOT)
    roots = Counter(root.values())
    del roots[_NO_ROOT]
    if len(roots) < 2:
        return rows
    shown = [root[row["id"]] for row in rows if row["name"] == PARAMETERS]
    chosen = shown[0] if shown else roots.most_common(1)[0][0]
    return [row for row in rows if root[row["id"]] in (chosen, _NO_ROOT)]


def _around(missing: int, index: Mapping[int, int], nodes: Sequence[Node]) -> int:
    """Return the parent of an operator that is missing because an error ended it; else -1.

    Recomputation in the backward pass stops that way. Python called the operator, so its parent is
    the open annotation or autograd node.
    """
    before = [number for number in index if number < missing]
    place = index[max(before)] if before else -1
    while place >= 0 and nodes[place].call is not None:
        place = nodes[place].parent
    return place


def _engine_node(place: int, nodes: Sequence[Node]) -> int:
    """Return the innermost node of autograd's engine around `place`, or `place` itself; -1."""
    while place >= 0 and not nodes[place].name.startswith(AUTOGRAD):
        place = nodes[place].parent
    return place


def _outside(place: int, over: set[int], nodes: Sequence[Node]) -> int:
    """Return the innermost node around `place`, or `place` itself, that is in none of `over`."""
    while over and (inside := _engine_node(place, nodes)) in over:
        place = nodes[inside].parent
    return place


def take_parameters(nodes: Sequence[Node]) -> tuple[list[int], list[Node]]:
    """Return the storages of the model's parameters, and the nodes without their annotation."""
    first = next((i for i, node in enumerate(nodes) if node.name == PARAMETERS), len(nodes))
    end = first + 1
    while end < len(nodes) and nodes[end].parent >= first:
        end += 1
    storages = {
        node.storages[0] for node in nodes[first:end] if node.call is not None and node.storages
    }
    shift = end - first
    remaining = [
        replace(node, parent=node.parent - shift) if node.parent >= end else node
        for node in (*nodes[:first], *nodes[end:])
    ]
    return sorted(storages), remaining


def _node(row: Mapping[str, Any], parent: int) -> Node:
    attributes = {item["name"]: item["value"] for item in row.get("attrs", ())}
    schema = str(attributes.get("op_schema") or "")
    sequence = int(attributes.get("seq_id", -1))
    call: Call | None = None
    storages: tuple[int, ...] = ()
    if schema:
        storages_in: list[int] = []
        storages_out: list[int] = []
        arguments = _arguments(row["inputs"], storages_in)
        outputs = _arguments(row["outputs"], storages_out)
        call = Call(schema, tuple(arguments), tuple(_flat(outputs)))
        storages = (*storages_in, *storages_out)
    return Node(str(row["name"]), parent, sequence, call, storages)


def _arguments(side: Mapping[str, Any], storages: list[int]) -> list[Any]:
    strides = side.get("strides") or [[] for _ in side["values"]]
    return [
        _argument(value, kind, shape, stride, storages)
        for value, kind, shape, stride in zip(
            side["values"], side["types"], side["shapes"], strides, strict=True
        )
    ]


def _argument(
    value: Any, kind: str, shape: Sequence[Any], stride: Sequence[Any], storages: list[int]
) -> Any:
    if kind.startswith("Tensor("):
        dtype = _DTYPES.get(kind[len("Tensor(") : -1])
        if dtype is None or not isinstance(value, list) or value[0] == _NO_TENSOR:
            return None
        storages.append(int(value[1]))
        return TensorSpec(dtype, tuple(shape), tuple(stride), str(value[5]))
    if kind.startswith("GenericList["):
        kinds = _split_kinds(kind[len("GenericList[") : -1])
        if len(kinds) != len(value):
            return value
        shapes = shape if len(shape) == len(value) else [[] for _ in value]
        strides = stride if len(stride) == len(value) else [[] for _ in value]
        return tuple(
            _argument(item, item_kind, item_shape, item_stride, storages)
            for item, item_kind, item_shape, item_stride in zip(
                value, kinds, shapes, strides, strict=True
            )
        )
    if kind == "None" or value == "<None>":
        return None
    if kind in ("Double", "Int", "Bool") and isinstance(value, str):
        return float(value) if value in ("inf", "-inf", "nan") else value
    return value


def _split_kinds(text: str) -> list[str]:
    """Split at commas outside brackets."""
    kinds: list[str] = []
    depth, begin = 0, 0
    for i, character in enumerate(text):
        depth += (character in "[(<") - (character in "])>")
        if character == "," and depth == 0:
            kinds.append(text[begin:i])
            begin = i + 1
    return [*kinds, text[begin:]] if text else kinds


def _flat(values: Sequence[Any]) -> list[TensorSpec]:
    specs: list[TensorSpec] = []
    for value in values:
        if isinstance(value, TensorSpec):
            specs.append(value)
        elif isinstance(value, (list, tuple)):
            specs += _flat(value)
    return specs
