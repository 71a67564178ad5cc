"""Traces of storage requests from other tools' files: OpenTelemetry, Jaeger, CSV, cache traces."""

from __future__ import annotations

import csv
import ctypes
import io
import itertools
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slipstream.data import ORACLE_GENERAL, get
from slipstream.engines.storage.policies import numbered
from slipstream.engines.storage.traces import OPS, AccessTrace, TraceError, distinct
from slipstream.errors import SlipstreamError, UsageError
from slipstream.files import opened, read_bytes
from slipstream.native.family import INT32, INT64, POINTER, TEXT, Family

_OBJECT = ("object", "object_id", "id", "key", "file.path", "path", "url.path", "http.url")
_SIZE = ("size", "object_size", "bytes", "file.size", "http.response.body.size")
_TIMES = {"time_ns": 1.0, "time": 1e9, "timestamp": 1e9, "time_s": 1e9, "time_ms": 1e6}
_MAX_BYTES = 4 << 30
_MAX_SIZE = 1 << 56
_DAMAGE = (
    "the message that begins here is cut off", "the field is malformed",
    "the trace id does not have 16 bytes",
    "the span id or that of its parent does not have 8 bytes",
    "the time is not between 0 and 2^63 ns", "the size is not an integer between 0 and 64 PiB",
)  # fmt: skip
_SPANS = Family("otlp", {
    "otlp_read": [TEXT, INT64, TEXT, INT32, INT32], "otlp_free": [POINTER],
    "otlp_result": [POINTER, INT32, POINTER],
}, {"otlp_read": POINTER, "otlp_free": None, "otlp_result": POINTER})  # fmt: skip
_MALFORMED = (AttributeError, KeyError, OverflowError, TypeError, ValueError)


class _Row(NamedTuple):
    time_ns: int
    object: str
    size: int
    op: int
    context: dict[str, str]


def import_trace(source: str | Path, *, skip_bad: bool = False) -> AccessTrace:
    """Read a trace of storage requests.

    Args:
        source: ``.npz`` of `AccessTrace.save`; spans as OTLP ``.pb`` or ``.json``, or Jaeger
            ``.json``, of which those with an attribute such as ``file.path`` are requests; ``.csv``
            with a header (object, size, time, op; other columns are context); libCacheSim's
            ``.oracleGeneral``; or ``cache_traces:NAME``, a public trace in ``SLIPSTREAM_DATA``,
            without its times, whose unit is unknown.
        skip_bad: whether to count malformed rows and spans in `AccessTrace.notes`, rather than to
            raise an error.

    Raises:
        TraceError: the file is damaged; `where` has the line or byte.
        UsageError: the format is unknown.
        SlipstreamError: protobuf files need the compiled library.
    """
    kind, _, name = str(source).partition(":")
    if kind == "cache_traces":
        found = get("cache_traces", trace=name)
        sizes = np.ones(len(found), np.int64) if found.sizes is None else found.sizes
        return AccessTrace.checked(numbered(found.keys)[0], sizes)
    path = Path(source)
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix != ".gz"]
    if ".npz" in suffixes:
        return AccessTrace.load(path)
    if ".oraclegeneral" in suffixes:
        return _oracle_general(path)
    bad, suffix = _Bad(path, skip_bad), "".join(suffixes[-1:])
    if suffix in (".pb", ".otlp"):
        return _protobuf_trace(path, bad)
    if suffix == ".csv":
        rows = list(_csv_rows(path, bad))
    elif suffix == ".json":
        # Spans are written when they end.
        rows = sorted(_rows_of(_json_spans(path, bad), bad), key=lambda row: row.time_ns)
    else:
        raise UsageError(
            f"the format of '{path.name}' is unknown",
            remedy="use one of: .csv, .json, .pb, .otlp, .npz, .oracleGeneral, cache_traces:NAME",
        )
    return AccessTrace.of(
        [row.object for row in rows], [row.size for row in rows],
        time_ns=[row.time_ns for row in rows], ops=[row.op for row in rows],
        contexts=[row.context for row in rows], notes=bad.notes,
    )  # fmt: skip


class _Bad:
    """Raises an error for a malformed entry of a file, or counts it in `notes`."""

    def __init__(self, path: Path, skip: bool) -> None:
        self.notes: Counter[str] = Counter()
        self.skip, self._path = skip, path

    def __call__(self, place: str, what: str) -> None:
        if not self.skip:
            raise TraceError(
                what, where=f"{self._path}, {place}",
                remedy="correct the file, or skip and count such entries with --skip-bad",
            )  # fmt: skip
        self.notes["bad entries skipped"] += 1


def _oracle_general(path: Path) -> AccessTrace:
    content = read_bytes(path, TraceError, most=_MAX_BYTES)
    if extra := len(content) % ORACLE_GENERAL.itemsize:
        raise TraceError(
            f"the last record has {extra} of {ORACLE_GENERAL.itemsize} bytes",
            where=f"{path}, byte {len(content) - extra}", remedy="copy the file again",
        )  # fmt: skip
    records = np.frombuffer(content, ORACLE_GENERAL)
    time_ns = records["time"].astype(np.int64) * 1_000_000_000
    return AccessTrace.checked(numbered(records["key"])[0], records["size"], time_ns)


def _csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each row, with the number of its last line."""
    text = read_bytes(path, TraceError, most=_MAX_BYTES).decode("utf-8-sig", "replace")
    reader = csv.reader(io.StringIO(text))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise TraceError(
            f"the row is malformed: {error}", where=f"{path}, line {reader.line_num}",
            remedy="check that every quote before this line is closed",
        ) from error  # fmt: skip


def _csv_rows(path: Path, bad: _Bad) -> Iterator[_Row]:
    lines = _csv_lines(path)
    header = [name.strip() for _, row in itertools.islice(lines, 1) for name in row]
    places = {name.lower(): at for at, name in enumerate(header)}
    at_object = next((places[name] for name in _OBJECT if name in places), None)
    at_size = next((places[name] for name in _SIZE if name in places), None)
    time = next(((places[name], unit) for name, unit in _TIMES.items() if name in places), None)
    at_op = places.get("op")
    if at_object is None:
        raise TraceError(
            f"the header has no column for the object, such as {_OBJECT[0]}; "
            f"it is: {','.join(header)[:80]}", where=f"{path}, line 1",
            remedy="name the columns object, size, time and op; all but object are optional",
        )  # fmt: skip
    used = {at_object, at_size, at_op, None if time is None else time[0]}
    context = [(at, name) for at, name in enumerate(header) if at not in used]
    for number, (line, row) in enumerate(lines):
        if not row:
            continue
        try:
            if len(row) != len(header):
                raise ValueError(f"{len(row)} fields under {len(header)} columns")
            yield _Row(
                number if time is None else _time(float(row[time[0]]) * time[1]),
                row[at_object], 1 if at_size is None else _size(row[at_size]),
                1 if at_op is None else OPS.index(row[at_op].strip().lower()),
                {name: row[at] for at, name in context},
            )  # fmt: skip
        except (ValueError, OverflowError) as error:
            bad(f"line {line}", f"the row is malformed: {error}")


def _size(value: Any) -> int:
    size = int(value)
    if not 0 <= size <= _MAX_SIZE:
        raise ValueError(f"the size {size} is not between 0 and 64 PiB")
    return size


def _time(nanoseconds: Any) -> int:
    time_ns = int(nanoseconds)
    if not 0 <= time_ns < 1 << 63:
        raise ValueError(f"the time {time_ns} is not between 0 and 2^63 ns")
    return time_ns


class _Span(NamedTuple):
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    attributes: dict[str, str]


_ReadSpan = Callable[[Any, dict[str, Any]], _Span]


def _rows_of(spans: Iterator[_Span], bad: _Bad) -> Iterator[_Row]:
    """Yield the spans that are requests, with the names of the spans around them."""
    spans_by_id: dict[tuple[str, str], _Span] = {}
    for span in spans:
        key = span.trace_id, span.span_id
        if spans_by_id.setdefault(key, span) is not span:
            bad.notes["duplicate spans skipped"] += 1
    for number, span in enumerate(spans_by_id.values()):
        attributes = dict(span.attributes)
        name = next((attributes.pop(key) for key in _OBJECT if key in attributes), None)
        if name is None:
            continue
        try:
            size = _size(next((attributes.pop(key) for key in _SIZE if key in attributes), 1))
            start_ns = _time(span.start_ns)
        except ValueError as error:
            bad(f"request {number + 1}", f"span {span.span_id} is malformed: {error}")
            continue
        callers, parent = [span.name], span
        while (parent := spans_by_id.get((span.trace_id, parent.parent_id), span)) is not span:
            callers.append(parent.name)
            if len(callers) > 32:  # a cycle, or deeper than is informative
                break
        yield _Row(start_ns, name, size, *_op_and_context(callers, attributes))


def _op_and_context(
    callers: Sequence[str], attributes: dict[str, str]
) -> tuple[int, dict[str, str]]:
    """Return the index of `OPS` and the context of a span, whose name is the first of `callers`."""
    context = dict(attributes)
    text = f"{callers[0]} {context.pop('op', '')}".lower()
    op = next((at for at, kind in enumerate(OPS) if kind in text), OPS.index("read"))
    return op, context | {"span": "/".join(reversed(callers))}


def _json_spans(path: Path, bad: _Bad) -> Iterator[_Span]:
    """Read OTLP or Jaeger JSON; OTLP may have one message per line."""
    for document in _documents(path, bad):
        if not isinstance(document, dict) or not ({"resourceSpans", "data"} & set(document)):
            bad("the top level", "there is neither resourceSpans (OTLP) nor data (Jaeger)")
            continue
        try:
            groups = list(_groups(document))
        except _MALFORMED as error:
            bad("the top level", f"the message is malformed: {type(error).__name__} {error}")
            continue
        for read, spans, shared in groups:
            for number, span in enumerate(spans):
                try:
                    yield read(span, shared)
                except _MALFORMED as error:
                    what = f"the span is malformed: {type(error).__name__} {error}"
                    bad(f"span {number + 1}", what)


def _documents(path: Path, bad: _Bad) -> Iterator[Any]:
    with opened(path, TraceError) as file:
        content = file.read(_MAX_BYTES)
    try:
        yield json.loads(content)
        return
    except (ValueError, RecursionError) as error:
        lines = content.splitlines()
        if len(lines) < 2 or not lines[0].rstrip().endswith(b"}"):
            raise TraceError(
                f"is not complete JSON: {error}", where=f"{path}, byte {getattr(error, 'pos', 0)}",
                remedy="export it again; it may have been cut off",
            ) from error  # fmt: skip
    for number, line in enumerate(lines):
        try:
            if line.strip():
                yield json.loads(line)
        except (ValueError, RecursionError) as damage:
            bad(f"line {number + 1}", f"the line is not JSON: {damage}")


def _groups(document: dict[str, Any]) -> Iterator[tuple[_ReadSpan, list[Any], dict[str, Any]]]:
    """Yield spans with their reader and what they share."""
    for resource in document.get("resourceSpans", ()):
        shared = _attributes(resource.get("resource", {}).get("attributes", ()))
        for scope in resource.get("scopeSpans", ()):
            yield _otlp_span, list(scope.get("spans", ())), shared
    for trace in document.get("data") or ():
        services = {
            key: {"service.name": str(process.get("serviceName", ""))}
            for key, process in trace.get("processes", {}).items()
        }
        yield _jaeger_span, list(trace.get("spans", ())), services


def _otlp_span(span: Any, shared: dict[str, Any]) -> _Span:
    # Ids are hexadecimal and int64 are strings, unlike in protobuf's own JSON.
    for key, length in (("traceId", 32), ("spanId", 16)):
        if len(bytes.fromhex(span[key])) * 2 != length:
            raise ValueError(f"{key} '{span[key]}' does not have {length} hexadecimal digits")
    return _Span(
        span["traceId"].lower(), span["spanId"].lower(), (span.get("parentSpanId") or "").lower(),
        str(span.get("name", "")), int(span["startTimeUnixNano"]),
        shared | _attributes(span.get("attributes", ())),
    )  # fmt: skip


def _jaeger_span(span: Any, services: dict[str, Any]) -> _Span:
    tags = {str(tag["key"]): str(tag.get("value", "")) for tag in span.get("tags") or ()}
    parents = [str(link["spanID"]) for link in span.get("references") or () if "spanID" in link]
    return _Span(
        str(span["traceID"]), str(span["spanID"]), next(iter(parents), ""),
        str(span.get("operationName", "")), int(span["startTime"]) * 1000,
        services.get(span.get("processID"), {}) | tags,
    )  # fmt: skip


def _attributes(pairs: Any) -> dict[str, str]:
    return {
        str(pair["key"]): str(next(iter((pair.get("value") or {}).values()), "")) for pair in pairs
    }


def _protobuf_trace(path: Path, bad: _Bad) -> AccessTrace:
    """Read OTLP protobuf: one message, or several with four bytes of length before each."""
    library = _SPANS.library
    if library is None:
        raise SlipstreamError(
            "OTLP protobuf is read by the compiled library, which is not available",
            remedy="export JSON, or install slipstream with a C++ compiler",
        )
    content = read_bytes(path, TraceError, most=_MAX_BYTES)
    keys = "\0".join((*_OBJECT, *_SIZE, "")).encode()
    spans = library.slipstream_otlp_read(content, len(content), keys, len(_OBJECT), bad.skip)
    if not spans:
        raise MemoryError("the spans do not fit into memory")
    size, results = INT64(), []
    for number in range(13):
        address = library.slipstream_otlp_result(spans, number, ctypes.byref(size))
        results.append(ctypes.string_at(address, size.value))
    library.slipstream_otlp_free(spans)
    *tables, requests, damage, duplicates = results
    for at, kind in np.frombuffer(damage, np.int64).reshape(-1, 2).tolist():
        bad(f"byte {at}", _DAMAGE[kind])
    if count := int(np.frombuffer(duplicates, np.int64)[0]):
        bad.notes["duplicate spans skipped"] += count
    words, values, objects, groups, paths = (
        [items[start:end] for start, end in itertools.pairwise([0, *np.frombuffer(ends, np.int64)])]
        for ends, items in zip(tables[::2], tables[1::2], strict=True)
    )
    names, name_of = distinct(map(_value_text, objects))
    names_of_words, texts = [*map(_utf8, words)], [*map(_value_text, values)]
    attributes = [
        {
            names_of_words[key]: texts[value]
            for key, value in np.frombuffer(group, np.int32).reshape(-1, 2)
        }
        for group in groups
    ]
    found = []
    for path_ in paths:
        group, *callers = np.frombuffer(path_, np.int32).tolist()
        found.append(_op_and_context([names_of_words[word] for word in callers], attributes[group]))
    contexts, context_of = distinct(tuple(sorted(context.items())) for _, context in found)
    time_ns, sizes, object_, context_ = np.frombuffer(requests, np.int64).reshape(-1, 4).T
    return AccessTrace.checked(
        name_of[object_], sizes, time_ns, np.array([op for op, _ in found], np.uint8)[context_],
        context_of[context_], names=names, context_texts=contexts or ((),), notes=bad.notes,
    )  # fmt: skip


def _value_text(value: bytes) -> str:
    """Return the text of an AnyValue message; of a list or map, its bytes."""
    kind, length, number = value[:1], 1, 0
    for byte in value[1:11]:
        number |= (byte & 127) << 7 * (length - 1)
        length += 1
        if byte < 128:
            break
    if kind == b"\x10":
        return str(bool(number))
    if kind == b"\x18":
        return str(number - (number >> 63 << 64))
    if kind == b"\x21":
        return str(struct.unpack_from("<d", value, 1)[0])
    return _utf8(value[length : length + number])


def _utf8(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")
