"""``.slipgraph``: an uncompressed zip of aligned NumPy arrays and a ``meta.json``, without pickle.

Equal graphs give equal bytes: fixed order, fixed dates, no compression. Files are untrusted: all
contents are checked before they become a `Graph`.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import GraphError, InvalidArgumentError
from slipstream.files import replacing
from slipstream.graph.call import Call
from slipstream.graph.exchange import Exchange
from slipstream.graph.graph import Graph
from slipstream.graph.io._meta import check_meta
from slipstream.graph.statistics import Statistics
from slipstream.graph.timeline import lower
from slipstream.graph.values import Allocations, Columns, Edges, Edit, Tasks

SCHEMA = 2
_ALIGNMENT = 64
_DATE = (1980, 1, 1, 0, 0, 0)
_ARRAYS = ("operand_start", "operands", "parameters")
_FIRST_WITH_MEMORY = 2
_LOCAL_HEADER_BYTES = 30
_MAX_META_BYTES = 1 << 30
# Maximum compression ratio of members above a small size, against decompression bombs; slipstream
# itself does not compress.
_MAX_RATIO, _SMALL_BYTES = 100, 1 << 20
_AGAIN = "record it again: slipstream profile WORKLOAD -o run.slipgraph"


def save(graph: Graph, path: Path) -> None:
    """Write `graph` to `path` atomically.

    Raises:
        GraphError: the file cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for table in ("tasks", "edges"):
        arrays |= _named(table, getattr(graph, table))
    arrays |= {name: getattr(graph, name) for name in _ARRAYS}
    arrays |= _named("memory", graph.memory)
    meta = {"format": "slipgraph", "schema": SCHEMA, **document(graph)}
    if masks := graph.statistics.masks:
        arrays["masks"] = np.frombuffer(b"".join(mask.bits for mask in masks), np.uint8)
        meta["masks"] = graph.statistics.masks_to_json()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            _write(temporary, arrays, json.dumps(meta, separators=(",", ":")).encode())
    except OSError as error:
        raise GraphError(
            f"the graph cannot be written: {error.strerror}",
            where=str(path),
            remedy="choose another file with -o",
        ) from error


def document(graph: Graph) -> dict[str, Any]:
    """Return all fields of a graph but its arrays, as JSON."""
    return {
        "strings": list(graph.strings),
        "calls": [call.to_json() for call in graph.calls],
        "shrunk": [None if call is None else call.to_json() for call in graph.shrunk],
        "lanes": list(graph.lanes),
        "samples": graph.samples,
        "meta": dict(graph.meta),
        "edits": [[edit.technique, edit.what, edit.tasks, edit.note] for edit in graph.edits],
        "statistics": graph.statistics.to_json(),
        "exchanges": [row.to_json() for row in graph.exchanges],
    }


def parts_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that `document` encoded.

    Raises:
        KeyError, ValueError, TypeError, AttributeError, RecursionError: `meta` is not a document.
    """
    check_meta(meta["meta"])
    return {
        "strings": tuple(_text(text) for text in meta["strings"]),
        "calls": tuple(_call(call) for call in meta["calls"]),
        "lanes": tuple(_text(text) for text in meta["lanes"]),
        "samples": int(meta["samples"]),
        "meta": dict(meta["meta"]),
        "edits": tuple(
            Edit(_text(a), _text(b), int(c), *map(_text, note)) for a, b, c, *note in meta["edits"]
        ),
        "shrunk": tuple(None if call is None else _call(call) for call in meta.get("shrunk", ())),
        "statistics": Statistics.from_json(meta.get("statistics")),
        "exchanges": tuple(Exchange.from_json(row) for row in meta.get("exchanges", ())),
    }


def _named(table: str, columns: Columns) -> dict[str, NDArray[Any]]:
    return {f"{table}/{name}": column for name, column in columns.columns().items()}


def load(path: Path) -> Graph:
    """Read and check a graph.

    Raises:
        GraphError: the file is missing, truncated, not a graph, from a newer slipstream or
            inconsistent, or its dependencies form a cycle.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive, path)
    except FileNotFoundError:
        raise GraphError(
            f"there is no file '{path}'",
            remedy="record one: slipstream profile WORKLOAD -o run.slipgraph",
        ) from None
    except GraphError:
        raise
    except OSError as error:
        what = error.strerror or error
        raise GraphError(f"the file cannot be read: {what}", where=str(path)) from error
    except Exception as error:
        # zipfile and its decompressors raise many types of error for damaged files.
        raise GraphError(
            f"not a complete .slipgraph file: {error}", where=str(path), remedy=_AGAIN
        ) from error


def _write(file: Path, arrays: dict[str, NDArray[Any]], meta: bytes) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.ascontiguousarray(array), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", _DATE)
            # Pad so that the array's bytes start aligned and the file can be memory-mapped
            # (the npy header itself is a multiple of 64 bytes).
            start = archive.fp.tell() + _LOCAL_HEADER_BYTES + len(info.filename)  # type: ignore[union-attr]
            padding = -(start + 4) % _ALIGNMENT
            # An extra field: id, length, zeros; readers skip unknown ids.
            info.extra = b"SL" + padding.to_bytes(2, "little") + bytes(padding)
            archive.writestr(info, buffer.getvalue())
        archive.writestr(zipfile.ZipInfo("meta.json", _DATE), meta)


def _read(archive: zipfile.ZipFile, path: Path) -> Graph:
    def broken(what: str) -> GraphError:
        return GraphError(what, where=str(path), remedy=_AGAIN)

    def array(name: str, dtype: Any) -> NDArray[Any]:
        try:
            with archive.open(f"{name}.npy") as file:
                values = np.lib.format.read_array(file, allow_pickle=False)
        except KeyError:
            raise broken(f"'{name}' is missing") from None
        except (ValueError, OverflowError, MemoryError, SyntaxError, TypeError) as error:
            raise broken(f"'{name}' is not a plain array: {error}") from error
        if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype != dtype:
            raise broken(f"'{name}' has the wrong type or shape")
        return values

    def columns(name: str, table: type[Columns]) -> dict[str, NDArray[Any]]:
        return {column: array(f"{name}/{column}", t) for column, t in table.dtypes.items()}

    for info in archive.infolist():
        if info.file_size > max(_MAX_RATIO * info.compress_size, _SMALL_BYTES):
            raise broken(f"'{info.filename}' expands more than {_MAX_RATIO} times")
    try:
        if archive.getinfo("meta.json").file_size > _MAX_META_BYTES:
            raise broken("meta.json is too large")
        meta = json.loads(archive.read("meta.json"))
        if meta["format"] != "slipgraph":
            raise KeyError("format")
        schema = int(meta["schema"])
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise broken("this zip file is not a .slipgraph") from error
    if schema > SCHEMA:
        raise GraphError(
            f"the graph has schema {schema}; this slipstream reads up to {SCHEMA}",
            where=str(path),
            remedy="upgrade slipstream",
        )
    try:
        graph = Graph(
            tasks=Tasks(**columns("tasks", Tasks)),
            edges=Edges(**columns("edges", Edges)),
            memory=Allocations(**columns("memory", Allocations))
            if schema >= _FIRST_WITH_MEMORY
            else Allocations.none(),
            operand_start=array("operand_start", np.int64),
            operands=array("operands", np.int32),
            parameters=array("parameters", np.int32),
            **parts_of(meta),
        )
        if "masks" in meta:
            bits = array("masks", np.uint8).tobytes()
            graph = replace(graph, statistics=graph.statistics.with_masks(meta["masks"], bits))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        what = error.what if isinstance(error, InvalidArgumentError) else repr(error)
        raise broken(f"meta.json is not as expected: {what}") from error
    try:
        graph.check()
        if len(graph.edges):
            lower(graph, steps=1).compile()
    except GraphError as error:
        raise broken(error.what) from error
    return graph


def _call(value: Any) -> Call:
    call = Call.from_json(value)
    call.check()
    return call


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
