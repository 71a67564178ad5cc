"""`Statistics` in files: round trips, contradictions, and invalid content."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import GraphError
from slipstream.graph import (
    GradientNoise,
    Graph,
    ModuleZeros,
    Spectrum,
    Statistics,
    TableIds,
    load,
    read_chakra,
    save,
    write_chakra,
)
from small_graphs import graph_of

FOUND = Statistics(
    recorded=("grads", "ids", "sparsity", "spectra"),
    steps=4,
    same_batch=True,
    ids=(TableIds("model.0", 9, 2, 4, 6, 2, (3, 1), (4, 2), (0.5, 1.0), (0, 1, 1), (2.0, 1.0)),),
    spectra=(Spectrum("model.1.weight", "gradient", 2, 3, 2.5, (2.0, 1.5), True),),
    grads=(GradientNoise("model.1.weight", 6, 4, 0.5, 0.25, None, 0.0, 1.0),),
    sparsity=(ModuleZeros("model.1", "Linear", 6, None, 0.5, 0.25, 0.0),),
)


def a_graph(statistics: Statistics = FOUND) -> Graph:
    graph = graph_of([(0, 10, 1), (1, 20, 2)], [(0, 1, 3.0)], meta={"threads": 1})
    return replace(graph, statistics=statistics)


@pytest.mark.parametrize(
    "found", [FOUND, Statistics(), Statistics(("ids",), 2, reasons={"ids": "?"})]
)
def test_they_survive_both_kinds_of_file(found: Statistics, tmp_path: Path) -> None:
    path, other = tmp_path / "run.slipgraph", tmp_path / "run.et"
    save(a_graph(found), path)
    assert load(path).statistics == found
    first = path.read_bytes()
    save(load(path), path)
    assert path.read_bytes() == first
    write_chakra(a_graph(found), other)
    assert read_chakra(other).statistics == found


def test_a_graph_is_checked_with_its_statistics() -> None:
    a_graph().check()
    (noise,) = FOUND.grads
    with pytest.raises(GraphError, match=noise.parameter):
        a_graph(replace(FOUND, grads=(replace(noise, zeros=1.5),))).check()


def test_a_file_from_before_statistics_has_none(tmp_path: Path) -> None:
    path = tmp_path / "run.slipgraph"
    save(a_graph(), path)
    _rewrite(path, lambda meta: meta.pop("statistics"))
    assert load(path).statistics == Statistics()


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("ids", "rows", -1), ("ids", "rows", 2), ("ids", "rows", "9"), ("ids", "rows", True),
        ("ids", "rows", 1e400), ("ids", "hot_ids", [1]), ("ids", "hot_ids", 7),
        ("ids", "top_share", [0.5, 2.0]), ("ids", "table", None), ("spectra", "of", "bias"),
        ("spectra", "values", [1.0, 1.0, 1.0]), ("spectra", "values", ["1"]),
        ("spectra", "norm", float("nan")), ("spectra", "exact", 1), ("grads", "zeros", 1.5),
        ("grads", "variance", "none"), ("grads", "norm", 10**400), ("sparsity", "inputs", -0.5),
    ],
)  # fmt: skip
def test_contradictory_statistics_are_an_error(
    part: str, key: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.slipgraph"
    save(a_graph(), path)

    def spoil(meta: dict[str, Any]) -> None:
        meta["statistics"][part][0][key] = value

    _rewrite(path, spoil)
    with pytest.raises(GraphError):
        load(path)


@pytest.mark.parametrize("found", [7, "text", ["ids"], {"recorded": ["ids"]}, {"ids": 3}])
def test_invalid_statistics_are_an_error(found: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.slipgraph"
    save(a_graph(), path)
    _rewrite(path, lambda meta: meta.update(statistics=found))
    with pytest.raises(GraphError):
        load(path)


def test_edits_leave_them_unchanged() -> None:
    from slipstream.graph import Editor
    from slipstream.provenance import Provenance

    edit = Editor(a_graph(), "test")
    edit.scale(0, 0.5, Provenance.ASSUMED)
    assert edit.apply("half").statistics == FOUND


def _rewrite(path: Path, change: Any) -> None:
    with zipfile.ZipFile(path) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    meta = json.loads(parts["meta.json"])
    change(meta)
    parts["meta.json"] = json.dumps(meta).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
