"""Logs of deployed models, ``.xr``: a header, then records that can be appended one by one.

    SLIPXR1\\n  then records of: tag (4), bytes (4), CRC-32 (4), contents; all little-endian
    HEAD       JSON: runtime, hash of the model, tensors, preprocessing, environment
    DECL       JSON: one more tensor, named while recording
    STAT       frame, first tensor, count (each uint32), then `count` `STATISTICS`
    TENS       a line of JSON, then a tensor's values, zlib-compressed
    FRAM       JSON at the end of a frame: its number, key, latency, raw input, readings
    ENDS       number of frames (uint32)

FRAM and TENS are optional. A truncated log is read up to the cut.
"""

from __future__ import annotations

import json
import math
import queue
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.files import expanded, opened
from slipstream.runtimes.taps import TappedTensor
from slipstream.ship.xray.statistics import STATISTICS, Array
from slipstream.tables import json_values

MAGIC = b"SLIPXR1\n"
_RECORD = struct.Struct("<4sII")
_STAT = struct.Struct("<III")
_MAX_BYTES, _MAX_TENSOR_BYTES = 1 << 30, 1 << 28
_MAX_QUEUED = 4


class LogError(SlipstreamError):
    """A log is damaged, of another model, or lacks requested data."""


@dataclass
class Frame:
    """Record of one inference.

    Attributes:
        index: number of the frame.
        statistics: `STATISTICS` [tensors]; 0 elements for tensors that were not recorded.
        tensors: float32 values by the tensor's index, if the level stores them.
        facts: ``key``, ``latency_ns``, ``raw`` (path of the raw input, or its hash), readings.
    """

    index: int
    statistics: Array
    tensors: dict[int, Array] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class LogWriter:
    """Writer of a log.

    Args:
        background: whether to write in a separate thread, which is worth it only if tensors are
            compressed.

    Raises:
        LogError: the file cannot be written.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], background: bool = False) -> None:
        try:
            self._file = open(path, "wb")  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise LogError(f"cannot write the log: {error.strerror}", where=str(path)) from error
        self._file.write(MAGIC)
        self._frames = 0
        self._failed: Exception | None = None
        self._queue: queue.Queue[tuple[bytes, Any] | None] = queue.Queue(_MAX_QUEUED)
        self._closed = False
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._loop, name="slipstream-xray", daemon=True)
            self._thread.start()
        self._json(b"HEAD", header)

    def declare(self, index: int, layer: TappedTensor) -> None:
        """Add a tensor."""
        self._json(b"DECL", {"index": index, **asdict(layer)})

    def statistics(self, frame: int, first: int, values: Array) -> None:
        """Write statistics of the tensors from `first` on."""
        self._put(b"STAT", struct.pack("<III", frame, first, len(values)) + values.tobytes())

    def tensor(self, frame: int, index: int, values: Array) -> None:
        """Write a tensor's values."""
        self._put(b"TENS", (frame, index, values.copy()))

    def frame(self, index: int, facts: Mapping[str, Any]) -> None:
        """End a frame."""
        self._frames = index + 1
        self._json(b"FRAM", {"frame": index, **facts})

    def close(self) -> None:
        """Write the end, at most once; raise LogError if this or an earlier write failed."""
        if not self._closed:
            self._closed = True
            self._put(b"ENDS", struct.pack("<I", self._frames))
            if self._thread is not None:
                self._queue.put(None)
                self._thread.join()
            self._file.close()
        if isinstance(self._failed, OSError):
            raise LogError(f"cannot write the log: {self._failed}", where=self._file.name)
        if self._failed is not None:
            raise self._failed

    def _json(self, tag: bytes, value: Mapping[str, Any]) -> None:
        self._put(tag, json.dumps(json_values(value), separators=(",", ":")).encode())

    def _put(self, tag: bytes, content: Any) -> None:
        if self._thread is None:
            self._write(tag, content)
        else:
            self._queue.put((tag, content))

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            self._write(*item)

    def _write(self, tag: bytes, content: Any) -> None:
        if self._failed is not None:
            return  # the app continues; `close` raises
        try:
            if tag == b"TENS":
                frame, index, values = content
                line = {"frame": frame, "tensor": index, "dtype": values.dtype.str}
                line["shape"] = list(values.shape)
                packed = zlib.compress(values.tobytes(), 1)
                content = json.dumps(line).encode() + b"\n" + packed
            self._file.write(_RECORD.pack(tag, len(content), zlib.crc32(content)) + content)
        except Exception as error:
            self._failed = error


@dataclass(frozen=True)
class Log:
    """A log, read frame by frame in constant memory.

    Attributes:
        header: contents of HEAD.
        layers: all tensors: the model's inputs, layers and outputs, and those added by `tap`.
        count: number of complete frames.
        damage: damage at the file's end; empty if there is none.
    """

    path: Path
    header: dict[str, Any]
    layers: tuple[TappedTensor, ...]
    count: int
    damage: str = ""

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read the header of the log at `path` and count its frames.

        Raises:
            LogError: it is missing, is not a log, or has a damaged record before its end.
        """
        path = Path(path)
        header: dict[str, Any] | None = None
        layers: list[TappedTensor] = []
        seen: set[int] = set()
        complete, damage, ended = 0, "", False
        for tag, content in _records(path):
            if tag == b"":
                damage = content.decode()
            elif header is None:
                header = _json(path, content) if tag == b"HEAD" else None
                if header is None or not isinstance(header.get("tensors"), list):
                    raise LogError("the first record is not a header", where=str(path))
                layers = [_layer(path, tensor) for tensor in header["tensors"]]
            elif tag == b"DECL":
                layers.append(_layer(path, _json(path, content)))
            elif tag == b"STAT" and len(content) >= _STAT.size:
                seen.add(_STAT.unpack_from(content)[0])
            elif tag == b"FRAM":
                complete += 1
            elif tag == b"ENDS":
                ended = True
        if header is None:
            raise LogError(
                f"the log has no header{': ' + damage if damage else ''}", where=str(path),
                remedy="record it again, and end the recording with close() or a with block",
            )  # fmt: skip
        if not complete:  # devices write no FRAM; their last frame is complete if the log was ended
            complete = len(seen) if ended or not seen else len(seen) - 1
        if not ended:
            damage = damage or "recording was not ended"
            damage = f"{damage}; {complete} complete frames are read"
        return cls(path, header, tuple(layers), complete, damage)

    def frames(self) -> Iterator[Frame]:
        """Yield the complete frames, in order.

        Raises:
            LogError: a record has invalid contents.
        """
        try:
            yield from self._frames()
        except (
            ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error,
        ) as error:  # fmt: skip
            raise LogError(f"the log is damaged: {error!r:.200}", where=str(self.path)) from error

    def _frames(self) -> Iterator[Frame]:
        yielded = 0
        current: Frame | None = None
        marked = False
        for tag, content in _records(self.path):
            if tag in (b"STAT", b"TENS"):
                number = (
                    _STAT.unpack_from(content)[0]
                    if tag == b"STAT"
                    else json.loads(content[: content.index(b"\n")])["frame"]
                )
                if current is not None and current.index != number and not marked:
                    yield current
                    yielded += 1
                    current = None
                if yielded == self.count:
                    return
                if current is None:
                    current = Frame(number, np.zeros(len(self.layers), STATISTICS))
                (self._add_statistics if tag == b"STAT" else self._add_tensor)(current, content)
            elif tag == b"FRAM":
                marked = True
                facts = _json(self.path, content)
                for name, kind in (("frame", int), ("answer", int), ("latency_ns", (int, float))):
                    if not isinstance(facts.get(name, 0), kind):
                        raise ValueError(f"{name} {facts[name]!r:.40}")
                if current is None:
                    current = Frame(facts["frame"], np.zeros(len(self.layers), STATISTICS))
                current.facts = facts
                yield current
                yielded, current = yielded + 1, None
        if current is not None and not marked and yielded < self.count:
            yield current

    def _add_statistics(self, frame: Frame, content: bytes) -> None:
        _, first, count = _STAT.unpack_from(content)
        values = np.frombuffer(content, STATISTICS, offset=_STAT.size)
        if len(values) != count or first + count > len(self.layers):
            raise LogError(
                f"frame {frame.index} has tensors that the header lacks", where=str(self.path)
            )
        frame.statistics[first : first + count] = values

    def _add_tensor(self, frame: Frame, content: bytes) -> None:
        line, _, packed = content.partition(b"\n")
        facts = json.loads(line)
        dtype, shape = np.dtype(facts["dtype"]), facts["shape"]
        size = min(math.prod(shape) * dtype.itemsize, _MAX_TENSOR_BYTES)
        frame.tensors[facts["tensor"]] = np.frombuffer(expanded(packed, size), dtype).reshape(shape)


def _records(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield tag and contents of each record; last, with an empty tag, damage at the end."""
    with opened(path, LogError) as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise LogError(
                "the file is not a log of slipstream xray", where=str(path),
                remedy="pass a file that `xray.record` or a device wrote",
            )  # fmt: skip
        at = len(MAGIC)
        while head := file.read(_RECORD.size):
            cut = f"the log is truncated at byte {at}"
            if len(head) < _RECORD.size:
                yield b"", cut.encode()
                return
            tag, size, crc = _RECORD.unpack(head)
            if size > _MAX_BYTES or not tag.isalpha():
                raise LogError(f"the log is damaged at byte {at}: not a record", where=str(path))
            content = file.read(size)
            if len(content) < size:
                yield b"", cut.encode()
                return
            if zlib.crc32(content) != crc:
                raise LogError(
                    f"the log is damaged at byte {at}: wrong checksum of a {tag.decode()} record",
                    where=str(path), remedy="copy it from the device again",
                )  # fmt: skip
            at += _RECORD.size + size
            yield tag, content


def _json(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LogError(f"the log is damaged: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise LogError("the log is damaged: a record is not a JSON object", where=str(path))
    return value


def _layer(path: Path, described: Any) -> TappedTensor:
    try:
        return TappedTensor.from_dict(described)
    except (TypeError, ValueError, AttributeError) as error:
        raise LogError(f"invalid description of a tensor: {error}", where=str(path)) from error


def model_layers(layers: Sequence[TappedTensor]) -> list[int]:
    """Return indices of the layers that a model computes, without inputs, outputs and taps."""
    return [n for n, layer in enumerate(layers) if layer.kind not in ("input", "output", "tap")]
