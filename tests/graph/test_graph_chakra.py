"""MLCommons Chakra export and import: lossless for ours, by the public schema for others."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_traces import graph as traced
from small_traces import kernel, launch, op

from slipstream.errors import GraphError
from slipstream.graph import (
    Dependency,
    Graph,
    Kind,
    read_chakra,
    read_kineto,
    replace_tasks,
    replay,
    write_chakra,
)
from slipstream.graph.io._chakra_schema import AttributeProto, GlobalMetadata, Node
from slipstream.graph.io.chakra import from_chakra, to_chakra
from small_graphs import graph_of, graphs


def _framed(message: Any) -> bytes:
    """Return length, then message, with protobuf's varint writer."""
    from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]

    data = message.SerializeToString()
    return bytes(_VarintBytes(len(data))) + data


def _foreign(*nodes: dict[str, Any]) -> bytes:
    """Return a trace as another tool writes it."""
    parts = [_framed(GlobalMetadata(version="0.0.4"))]
    for fields in nodes:
        cpu = fields.pop("cpu", None)
        node = Node(**fields)
        if cpu is not None:
            node.attr.add(name="is_cpu_op", bool_val=cpu)
        parts.append(_framed(node))
    return b"".join(parts)


def _assert_equal(first: Graph, other: Graph) -> None:
    for name, column in first.tasks.columns().items():
        assert column.dtype == getattr(other.tasks, name).dtype
        assert np.array_equal(column, getattr(other.tasks, name)), name
    for name in ("source", "target", "kind", "delay_ns", "lag"):
        assert np.array_equal(getattr(first.edges, name), getattr(other.edges, name)), name
    for name in ("operand_start", "operands", "parameters"):
        assert np.array_equal(getattr(first, name), getattr(other, name)), name
    for name in ("strings", "calls", "lanes", "samples", "edits"):
        assert getattr(first, name) == getattr(other, name), name
    assert dict(first.meta) == dict(other.meta)


# Field numbers of the public schema (mlcommons/chakra, schema/protobuf/et_def.proto)


def test_field_numbers_are_those_of_the_public_schema() -> None:
    node = {f.name: f.number for f in Node.DESCRIPTOR.fields}
    assert node == {
        "id": 1, "name": 2, "type": 3, "ctrl_deps": 4, "data_deps": 5, "start_time_micros": 6,
        "duration_micros": 7, "inputs": 8, "outputs": 9, "attr": 10,
    }  # fmt: skip
    attribute = {f.name: f.number for f in AttributeProto.DESCRIPTOR.fields}
    assert attribute["double_val"] == 3
    assert attribute["int64_val"] == 9
    assert attribute["int64_list"] == 10
    assert attribute["bool_val"] == 27
    assert attribute["string_val"] == 29
    assert attribute["bytes_list"] == 32
    assert {f.name: f.number for f in GlobalMetadata.DESCRIPTOR.fields} == {"version": 1, "attr": 2}


def test_bytes_of_a_node_are_as_the_wire_format_says() -> None:
    # 08 = field 1 varint, 12 = field 2 bytes, 18 = field 3 varint, 22 = field 4 packed.
    node = Node(id=3, name="x", type=4, ctrl_deps=[1, 2])
    assert node.SerializeToString() == bytes.fromhex("0803 1201 78 1804 2202 0102")


# Round trip


@settings(max_examples=300)
@given(graphs())
def test_a_round_trip_is_equal(graph: Graph) -> None:
    _assert_equal(graph, from_chakra(to_chakra(graph)))


@given(graphs())
def test_equal_graphs_give_equal_bytes(graph: Graph) -> None:
    assert to_chakra(graph) == to_chakra(from_chakra(to_chakra(graph)))


def test_a_real_trace_round_trips(shared_data: Path, tmp_path: Path) -> None:
    name = "timeline_analysis_sampled_rank-0.json.gz"
    graph = read_kineto(shared_data / "gpu_traces" / name)
    write_chakra(graph, tmp_path / "run.et")
    back = read_chakra(tmp_path / "run.et")
    _assert_equal(graph, back)
    assert replay(back).end_ns.tobytes() == replay(graph).end_ns.tobytes()


def test_other_readers_see_types_times_and_dependencies() -> None:
    graph = traced(op("aten::mm", 0, 20), launch(5, 5, 1), kernel("nccl_all_reduce", 12, 100, 1))
    data = to_chakra(graph)
    nodes = _nodes(data)
    by_name = {node.name: node for node in nodes}
    reduce = by_name["nccl_all_reduce"]
    attributes = {item.name: item for item in reduce.attr}
    assert reduce.type == 7  # COMM_COLL_NODE
    assert attributes["comm_type"].int64_val == 0  # ALL_REDUCE
    assert (reduce.start_time_micros, reduce.duration_micros) == (12, 100)
    assert list(reduce.ctrl_deps) == [by_name["cudaLaunchKernel"].id]
    assert not attributes["is_cpu_op"].bool_val
    assert {item.name: item for item in by_name["aten::mm"].attr}["is_cpu_op"].bool_val


def _nodes(data: bytes) -> list[Any]:
    """Parse with protobuf's varint reader."""
    from google.protobuf.internal.decoder import _DecodeVarint32  # type: ignore[attr-defined]

    nodes, at = [], 0
    while at < len(data):
        length, at = _DecodeVarint32(data, at)
        nodes.append(Node.FromString(data[at : at + length]) if nodes or at > 5 else None)
        at += length
    return [node for node in nodes[1:] if node is not None]


# Files of other tools


def test_a_foreign_trace_becomes_lanes_of_cpu_device_and_network() -> None:
    graph = from_chakra(
        _foreign(
            {"id": 10, "name": "mm", "type": 4, "duration_micros": 5, "cpu": True},
            {
                "id": 11,
                "name": "gemm",
                "type": 4,
                "duration_micros": 50,
                "ctrl_deps": [10],
                "cpu": False,
            },
            {"id": 12, "name": "all_reduce", "type": 7, "duration_micros": 20, "data_deps": [11]},
            {
                "id": 13,
                "name": "update",
                "type": 4,
                "duration_micros": 1,
                "data_deps": [12],
                "ctrl_deps": [10],
                "cpu": True,
            },
        ),
        "other.et",
    )
    assert graph.lanes == ("cpu", "device", "network")
    assert [Kind(kind) for kind in graph.tasks.kind] == [
        Kind.OP, Kind.KERNEL, Kind.COMMUNICATION, Kind.OP,
    ]  # fmt: skip
    assert replay(graph).end_ns.tolist() == [5e3, 55e3, 75e3, 76e3]
    assert [Dependency(kind) for kind in graph.edges.kind][1:] == [Dependency.COMMUNICATION] * 2
    lane = graph.tasks.lane
    assert (lane[graph.edges.source] != lane[graph.edges.target]).all(), (
        "implied by the order of the lane"
    )
    assert graph.meta["untimed_tasks"] == 0


def test_nodes_may_come_in_any_order() -> None:
    graph = from_chakra(
        _foreign(
            {"id": 2, "name": "second", "type": 4, "ctrl_deps": [1]},
            {"id": 1, "name": "first", "type": 4},
        )
    )
    assert [graph.strings[name] for name in graph.tasks.name] == ["first", "second"]
    assert graph.meta["untimed_tasks"] == 2


def test_a_cycle_is_named() -> None:
    data = _foreign(
        {"id": 1, "name": "a", "type": 4, "ctrl_deps": [3]},
        {"id": 2, "name": "b", "type": 4, "ctrl_deps": [1]},
        {"id": 3, "name": "c", "type": 4, "data_deps": [2]},
        {"id": 4, "name": "d", "type": 4, "data_deps": [3]},
    )
    with pytest.raises(GraphError, match=r"1 \(a\) -> 2 \(b\) -> 3 \(c\) -> 1 \(a\)") as caught:
        from_chakra(data, "round.et")
    assert caught.value.where == "round.et: 3 nodes"


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([{"id": 1, "name": "a", "type": 4, "ctrl_deps": [7]}], r"\bnode 7\b"),
        ([{"id": 1, "name": "a"}, {"id": 1, "name": "b"}], r"\bid 1\b"),
        ([], "no nodes"),
        ([{"id": 1, "name": "a", "type": 4, "duration_micros": 2**63}], "duration"),
    ],
)
def test_invalid_files_are_refused(nodes: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(GraphError, match=words):
        from_chakra(_foreign(*nodes))


# Bad input

_GOOD = to_chakra(graph_of([(0, 10.5, 2), (1, 20, 0), (0, 5, 0)], [(0, 1, 3), (1, 2)]))


@given(st.integers(1, len(_GOOD) - 1))
def test_a_truncated_file_is_refused(length: int) -> None:
    # Cut between two messages it is a shorter trace: then edges or the count do not match, or the
    # dropped tasks were the last ones and nothing refers to them.
    try:
        graph = from_chakra(_GOOD[:length])
    except GraphError:
        return
    assert len(graph) < 3


@settings(max_examples=300)
@given(st.data())
def test_changed_bytes_give_a_graph_or_a_graph_error(data: st.DataObject) -> None:
    broken = bytearray(_GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(GraphError):
        from_chakra(bytes(broken)).check()


@given(st.binary(max_size=60))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(GraphError):
        from_chakra(data)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"\bno file\b.*\bnone\.et\b"):
        read_chakra(tmp_path / "none.et")
    with pytest.raises(GraphError, match="cannot be read"):
        read_chakra(tmp_path)
    with pytest.raises(GraphError, match="cannot be written"):
        write_chakra(graph_of([(0, 1, 0)]), tmp_path / "no" / "run.et")


def test_a_name_changed_by_another_tool_is_reported() -> None:
    graph = replace_tasks(graph_of([(0, 1, 0)]))
    data = to_chakra(graph).replace(b"\x12\x06task 0", b"\x12\x06task 9")
    with pytest.raises(GraphError, match="task 9"):
        from_chakra(data)
