"""``.slipgraph``: round trips, equal bytes, and damaged and foreign files."""

from __future__ import annotations

import io
import json
import mmap
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slipstream as ss
from slipstream.errors import GraphError
from slipstream.graph import Call, Edges, Editor, Graph, TensorSpec, load, replace_tasks, save
from small_graphs import graph_of, graphs
from tiny_models import captured

fuzz = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.slipgraph"


def a_graph() -> Graph:
    return graph_of([(0, 10, 1), (1, 20, 2), (0, 5, 0)], [(0, 1, 3.0)], meta={"threads": 1})


def load_or_error(path: Path) -> Graph | None:
    """Return the graph, or None after a `GraphError`; anything else fails the test."""
    try:
        return load(path)
    except GraphError:
        return None


@given(graph=graphs())
@fuzz
def test_a_round_trip_gives_an_equal_graph(graph: Graph, path: Path) -> None:
    save(graph, path)
    assert load(path) == graph


def test_a_captured_graph_survives_the_round_trip(path: Path) -> None:
    graph = captured("transformer")
    save(graph, path)
    assert load(path) == graph


def test_a_file_without_a_second_size_loads(path: Path) -> None:
    graph = captured("mlp")
    assert graph.shrunk
    save(graph, path)
    with_meta(path, lambda meta: meta.pop("shrunk"))
    assert load(path).shrunk == ()


@pytest.mark.parametrize("shrunk", [[None], [["op"]], [7], 7, "text", {"a": 1}])
def test_calls_of_another_size_that_match_none_are_an_error(path: Path, shrunk: Any) -> None:
    save(a_graph(), path)
    with_meta(path, lambda meta: meta.update(shrunk=shrunk))
    assert load_or_error(path) is None


def test_equal_graphs_give_equal_bytes(path: Path) -> None:
    save(a_graph(), path)
    first = path.read_bytes()
    save(a_graph(), path)
    assert path.read_bytes() == first


def test_a_loaded_graph_is_written_as_the_same_bytes(path: Path) -> None:
    save(captured("mlp"), path)
    first = path.read_bytes()
    save(load(path), path)
    assert path.read_bytes() == first


def test_arrays_are_aligned_and_can_be_mapped(path: Path) -> None:
    graph = captured("mlp")
    save(graph, path)
    with path.open("rb") as file, zipfile.ZipFile(path) as archive:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        arrays = [info for info in archive.infolist() if info.filename.endswith(".npy")]
        assert len(arrays) >= 20
        for info in arrays:
            assert info.compress_type == zipfile.ZIP_STORED
            # By the zip format: 30 bytes, then the name and the extra field of the local header.
            name, extra = struct.unpack_from("<HH", whole, info.header_offset + 26)
            start = info.header_offset + 30 + name + extra
            header = io.BytesIO(whole[start : start + 256])
            np.lib.format.read_magic(header)
            shape, _, dtype = np.lib.format.read_array_header_1_0(header)
            data = start + header.tell()
            assert data % 64 == 0
            mapped = np.frombuffer(whole, dtype, count=shape[0], offset=data)
            if info.filename == "tasks/duration_ns.npy":
                assert (mapped == graph.tasks.duration_ns).all()
            del mapped
        whole.close()


def test_another_reader_of_zip_and_npy_reads_it(path: Path) -> None:
    graph = a_graph()
    save(graph, path)
    with np.load(path, allow_pickle=False) as arrays:
        assert (arrays["tasks/gap_ns"] == graph.tasks.gap_ns).all()


def test_a_failed_write_preserves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(a_graph(), path)
    first = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(GraphError, match="No space left"):
        save(a_graph(), path)
    assert path.read_bytes() == first
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_missing_file_reports_how_to_create_one(path: Path) -> None:
    with pytest.raises(GraphError, match="slipstream profile"):
        load(path)


def test_a_folder_is_not_a_graph(tmp_path: Path) -> None:
    with pytest.raises(GraphError):
        load(tmp_path)


@given(st.floats(0, 1))
@fuzz
def test_a_truncated_file_is_an_error(path: Path, share: float) -> None:
    save(a_graph(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * (len(whole) - 1))])
    assert load_or_error(path) is None


@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1))
@fuzz
def test_flipped_bytes_give_an_error_or_the_same_graph(
    path: Path, flips: list[tuple[float, int]]
) -> None:
    save(a_graph(), path)
    whole = bytearray(path.read_bytes())
    for place, change in flips:
        whole[int(place * len(whole))] ^= change
    path.write_bytes(whole)
    found = load_or_error(path)
    assert found is None or found == a_graph()


@given(st.binary(max_size=300))
@fuzz
def test_arbitrary_bytes_are_an_error(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert load_or_error(path) is None


def test_a_foreign_zip_is_an_error(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "<xml/>")
    with pytest.raises(GraphError, match=r"\bzip\b"):
        load(path)


def rewrite(path: Path, name: str, content: bytes | None) -> None:
    """Return the file with one member replaced or missing."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    members.pop(name)
    if content is not None:
        members[name] = content
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)


def with_meta(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    with zipfile.ZipFile(path) as archive:
        meta = json.loads(archive.read("meta.json"))
    change(meta)
    rewrite(path, "meta.json", json.dumps(meta).encode())


def npy(array: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def test_a_newer_schema_recommends_an_upgrade(path: Path) -> None:
    save(a_graph(), path)
    with_meta(path, lambda meta: meta.update(schema=99))
    with pytest.raises(GraphError, match="upgrade slipstream"):
        load(path)


class Bomb:
    """Unpickling this creates a file."""

    exploded = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Bomb, "exploded", True)


def test_pickled_objects_are_refused_and_never_loaded(path: Path) -> None:
    save(a_graph(), path)
    objects = np.array([Bomb()] * 3, object)
    rewrite(path, "tasks/duration_ns.npy", npy(objects, allow_pickle=True))
    with pytest.raises(GraphError, match="duration_ns"):
        load(path)
    assert not Bomb.exploded


@pytest.mark.parametrize(
    ("member", "array"),
    [
        ("tasks/name", np.array([1, 2, 99], np.int32)),
        ("tasks/name", np.array([1, 2, -1], np.int32)),
        ("tasks/call", np.array([-1, -1, 0], np.int32)),
        ("tasks/lane", np.array([0, 1, 2], np.int32)),
        ("tasks/kind", np.array([0, 0, 200], np.uint8)),
        ("tasks/phase", np.array([0, 0, 4], np.uint8)),
        ("tasks/provenance", np.array([0, 0, 99], np.uint8)),
        ("tasks/duration_ns", np.array([1, np.nan, 1])),
        ("tasks/gap_ns", np.array([1, -1.0, 1])),
        ("tasks/spread", np.array([1, np.inf, 1])),
        ("tasks/duration_ns", np.array([1.0])),
        ("tasks/duration_ns", np.array([1, 2, 3], np.float32)),
        ("tasks/duration_ns", np.ones((3, 1))),
        ("edges/source", np.array([3], np.int32)),
        ("edges/target", np.array([-1], np.int32)),
        ("edges/target", np.array([0, 1], np.int32)),
        ("edges/kind", np.array([99], np.uint8)),
        ("edges/lag", np.array([2], np.uint8)),
        ("edges/delay_ns", np.array([-1.0])),
        ("edges/delay_ns", np.array([np.nan])),
        ("operand_start", np.array([0, 2, 1, 0], np.int64)),
        ("operand_start", np.array([0, 0, 0, 9], np.int64)),
        ("operand_start", np.array([0], np.int64)),
    ],
)
def test_an_array_out_of_range_is_an_error(path: Path, member: str, array: np.ndarray) -> None:
    save(a_graph(), path)
    rewrite(path, f"{member}.npy", npy(array))
    with pytest.raises(GraphError) as caught:
        load(path)
    assert caught.value.where == str(path)


def test_a_cycle_is_named_with_its_tasks_and_the_file(path: Path) -> None:
    save(graph_of([(0, 1, 0), (0, 1, 0), (1, 1, 0)], [(1, 2), (2, 0)]), path)
    with pytest.raises(GraphError, match=r"cycle: .*task 1.* -> .*task 2.* -> .*task 0") as caught:
        load(path)
    assert caught.value.where == str(path)
    # An edge into the next step closes no cycle.
    save(graph_of([(0, 1, 0), (0, 1, 0), (1, 1, 0)], [(1, 2), (2, 0, 0.0, 1)]), path)
    assert load(path)


def test_every_array_is_needed(path: Path) -> None:
    save(a_graph(), path)
    with zipfile.ZipFile(path) as archive:
        members = archive.namelist()
    for member in members:
        save(a_graph(), path)
        rewrite(path, member, None)
        assert load_or_error(path) is None, member


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(
    st.sampled_from(["format", "schema", "strings", "calls", "lanes", "samples", "edits", "meta"]),
    json_values,
)
@fuzz
def test_wrong_meta_gives_an_error_or_a_graph(path: Path, key: str, value: Any) -> None:
    save(a_graph(), path)
    with_meta(path, lambda meta: meta.update({key: value}))
    load_or_error(path)


def test_deeply_nested_meta_is_an_error(path: Path) -> None:
    save(a_graph(), path)
    rewrite(path, "meta.json", b'{"format":"slipgraph","schema":1,"calls":' + b"[" * 100_000)
    assert load_or_error(path) is None


def test_a_huge_array_in_a_small_file_is_an_error(path: Path) -> None:
    save(a_graph(), path)
    data = npy(np.ones(3)).replace(b"(3,)", b"(9999999999999,)".ljust(4))
    rewrite(path, "tasks/duration_ns.npy", data)
    assert load_or_error(path) is None


def test_graphs_of_two_files_are_comparable(path: Path) -> None:
    save(a_graph(), path)
    save(a_graph(), path.with_name("same"))
    save(replace(a_graph(), samples=5), path.with_name("other"))
    assert ss.load(path) == ss.load(path.with_name("same"))
    assert ss.load(path) != ss.load(path.with_name("other"))


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: replace_tasks(graph, gap_ns=graph.tasks.gap_ns + 1),
        lambda graph: replace_tasks(graph, lane=graph.tasks.lane.astype(np.int64)),
        lambda graph: replace(graph, edges=Edges.none()),
        lambda graph: replace(graph, samples=graph.samples + 1),
        lambda graph: replace(graph, meta={**graph.meta, "more": 1}),
        lambda graph: Editor(graph, "none").apply("nothing"),
    ],
    ids=["a column", "a dtype", "edges", "samples", "meta", "edits"],
)
def test_graphs_that_differ_anywhere_are_not_equal(change: Callable[[Graph], Graph]) -> None:
    graph = a_graph()
    assert len(graph.edges)
    assert change(graph) != graph
    assert graph != "a graph"


_SPEC = TensorSpec("float32", (4, 4), (4, 1))
_OPTIMIZER = {"class": "SGD", "settings": {}, "tensors": [["float32", [64, 4], [4, 1], "cpu"]]}


@pytest.mark.parametrize(
    ("meta", "place"),
    [
        ({"threads": "8"}, "meta.threads"),
        ({"threads": 10**9}, "meta.threads"),
        ({"device": "toaster"}, "meta.device"),
        ({"unaligned_share": "0"}, "meta.unaligned_share"),
        ({"workload": "\ud800"}, "meta.workload"),
        # Multiplied by a number it would be a text of as many copies.
        (
            {"optimizer": {**_OPTIMIZER, "tensors": [["float32", ["64", 10**9], [4, 1], "cpu"]]}},
            "meta.optimizer.tensors[0][1][0]",
        ),
        ({"optimizer": {**_OPTIMIZER, "class": 3}}, "meta.optimizer.class"),
        ({"recipe": {"target": "a.py"}}, "meta.recipe.arguments"),
        ({"launches": {"k": [[1, 2, 3]]}}, "meta.launches"),
        ({"regions": {"mode": "default"}}, "meta.regions"),
    ],
)
def test_recorded_values_have_the_types_they_are_written_with(
    meta: dict[str, Any], place: str, path: Path
) -> None:
    save(replace(a_graph(), meta=meta), path)
    with pytest.raises(GraphError, match=re.escape(place)):
        load(path)


def test_entries_of_a_newer_slipstream_are_preserved(path: Path) -> None:
    meta = {"novel": [1, "a"], "optimizer": {**_OPTIMIZER, "novel": {}}}
    save(replace(a_graph(), meta=meta), path)
    assert load(path).meta == meta


@pytest.mark.parametrize(
    ("arguments", "outputs"),
    [
        ([_SPEC], [_SPEC]),
        ([_SPEC, "text"], [_SPEC]),
        ([None, _SPEC], [_SPEC]),
        ([_SPEC, _SPEC], [3]),
    ],
)
def test_a_call_that_does_not_match_its_schema_is_refused(
    arguments: list[Any], outputs: list[Any], path: Path
) -> None:
    call = Call("aten::mm(Tensor self, Tensor mat2) -> Tensor", (*arguments,), (*outputs,))
    save(replace(a_graph(), calls=(call,)), path)
    with pytest.raises(GraphError, match="aten::mm"):
        load(path)
