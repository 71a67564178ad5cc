"""Loaders of GPU traces, model files and cache traces."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.data._files import check_positive, read_lines
from slipstream.data._find import find
from slipstream.data.catalogue import Entry
from slipstream.data.errors import CorruptDataError, MissingDataError
from slipstream.data.kinds import Accesses, ModelFiles, Traces
from slipstream.errors import UnknownNameError

# More than ten times the unpacked size of the largest trace.
_MAX_BYTES = 256 << 20
# 24 bytes without padding.
ORACLE_GENERAL = np.dtype(
    [("time", "<u4"), ("key", "<u8"), ("size", "<u4"), ("next_access", "<i8")]
)
"""Records of libCacheSim's ``oracleGeneral`` files: time in s, size in bytes."""

_Columns = tuple[NDArray[np.uint64], NDArray[np.int64] | None, NDArray[np.int64] | None]


def gpu_traces(entry: Entry) -> Traces:
    """Find profiler traces with synchronisation, several streams and NCCL, named by file."""
    folder = find(entry)
    paths = sorted(folder.glob("*.json.gz"))
    return Traces(entry.name, {path.name.removesuffix(".json.gz"): path for path in paths})


def model_files(entry: Entry) -> ModelFiles:
    """Find the TensorFlow Lite files of a folder, by stem; read `classes` if it has a label list.

    The models are not opened; the runtimes validate them.
    """
    folder = find(entry)
    classes: tuple[str, ...] = ()
    for path in folder.glob("*label*.txt"):
        classes = tuple(line for line in read_lines(entry, path) if line)
    return ModelFiles(
        entry.name, {path.stem: path for path in sorted(folder.glob("*.tflite"))}, classes
    )


def cache_traces(entry: Entry, *, trace: str = "w106", limit: int | None = None) -> Accesses:
    """Load a cache trace: keys uint64 [N], and sizes and times if the trace has them.

    Args:
        trace: ``w106`` and ``cloudphysics`` (blocks of virtual disks), ``orm-busy`` (entities
            of a web shop), ``request`` (objects of a content network, with sizes), ``scarab``
            (product recommendations).
        limit: maximum number of accesses, from the start of the trace.
    """
    if trace not in _CACHE_TRACES:
        raise UnknownNameError("cache trace", trace, _CACHE_TRACES)
    file, parse = _CACHE_TRACES[trace]
    check_positive(limit=limit)
    path = find(entry) / file
    if not path.is_file():
        raise MissingDataError(
            entry.name, f"cache trace '{trace}' is not on this machine", where=str(path),
            remedy=f"copy {file} from {entry.source} to this path",
        )  # fmt: skip
    try:
        keys, sizes, times = parse(_content(entry, path))
    except ValueError as error:
        raise CorruptDataError(
            entry.name, f"the trace is not a sequence of whole records: {error}", where=str(path)
        ) from error
    return Accesses(
        entry.name,
        trace,
        keys[:limit],
        None if sizes is None else sizes[:limit],
        None if times is None else times[:limit],
    )


def _content(entry: Entry, path: Path) -> bytes:
    try:
        if path.suffix == ".xz":
            with lzma.open(path) as file:
                content = file.read(_MAX_BYTES + 1)
        else:
            with path.open("rb") as plain:
                content = plain.read(_MAX_BYTES + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise CorruptDataError(entry.name, f"damaged: {error}", where=str(path)) from error
    if len(content) > _MAX_BYTES:
        raise CorruptDataError(entry.name, "the trace unpacks to over 256 MiB", where=str(path))
    return content


def _words(content: bytes) -> _Columns:
    # Little-endian, since neighbouring blocks then have neighbouring numbers.
    return np.frombuffer(content, dtype="<u4").astype(np.uint64), None, None


def _long_words(content: bytes) -> _Columns:
    # Written by Java, hence big-endian; the keys are hashes.
    return np.frombuffer(content, dtype=">u8").astype(np.uint64), None, None


def _time_key_size(content: bytes) -> _Columns:
    table = np.array(content.split(), dtype=np.int64).reshape(-1, 3)
    return table[:, 1].astype(np.uint64), table[:, 2].copy(), table[:, 0].copy()


def _oracle_general(content: bytes) -> _Columns:
    records = np.frombuffer(content, dtype=ORACLE_GENERAL)
    return (
        records["key"].copy(),
        records["size"].astype(np.int64),
        records["time"].astype(np.int64),
    )


_CACHE_TRACES: dict[str, tuple[str, Callable[[bytes], _Columns]]] = {
    "w106": ("w106.trace.xz", _words),
    "cloudphysics": ("cloudPhysicsIO.oracleGeneral.bin", _oracle_general),
    "orm-busy": ("orm-busy.trace.xz", _words),
    "request": ("request.trace.xz", _time_key_size),
    "scarab": ("scarab-recs.trace.xz", _long_words),
}
