"""The log of a deployed model, ``.xr``: a header, then pieces that can be appended one by one.

    SLIPXR1\\n  then pieces of: tag (4), bytes (4), CRC-32 (4), contents; all little-endian
    HEAD       JSON: runtime, model's hash, tensors, preprocessing, environment
    DECL       JSON: one more tensor, named while recording
    STAT       frame, first tensor, count (each uint32), then as many `STATISTICS`
    TENS       JSON of a line, then a tensor's values, zlib-compressed
    FRAM       JSON: a frame is whole: its number, key, latency, raw input, readings
    ENDS       number of frames (uint32)

A device may leave out what it does not know: FRAM, TENS. What was cut off is read up to the cut.
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
from slipstream.runtimes.taps import Layer
from slipstream.ship.xray.statistics import STATISTICS, Array
from slipstream.tables import json_values

MAGIC = b"SLIPXR1\n"
_PIECE = struct.Struct("<4sII")
_STAT = struct.Struct("<III")
_LARGEST, _LARGEST_TENSOR = 1 << 30, 1 << 28
_WAITING = 4


class LogError(SlipstreamError):
    """A log is damaged, of another model, or does not hold what is asked of it."""


@dataclass
class Frame:
    """What was recorded of one inference.

    Attributes:
        index: number of the frame.
        statistics: `STATISTICS` [tensors]; of a tensor that was not recorded, 0 elements.
        tensors: values by the tensor's number, as float32, where the level keeps them.
        facts: ``key``, ``latency_ns``, ``raw`` (where the raw input lies, or its hash), readings.
    """

    index: int
    statistics: Array
    tensors: dict[int, Array] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class LogWriter:
    """Appends to a log; what is compressed, in a thread of its own, so that it costs little.

    Args:
        background: write everything there, which pays only where tensors are compressed.

    Raises:
        LogError: the file cannot be written.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], background: bool = False) -> None:
        try:
            self._file = open(path, "wb")  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise LogError(f"cannot be written: {error.strerror}", where=str(path)) from error
        self._file.write(MAGIC)
        self._frames = 0
        self._failed: Exception | None = None
        self._queue: queue.Queue[tuple[bytes, Any] | None] = queue.Queue(_WAITING)
        self._closed = False
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._loop, name="slipstream-xray", daemon=True)
            self._thread.start()
        self._json(b"HEAD", header)

    def declare(self, index: int, layer: Layer) -> None:
        """One more tensor."""
        self._json(b"DECL", {"index": index, **asdict(layer)})

    def statistics(self, frame: int, first: int, values: Array) -> None:
        """Those of tensors `first` and following."""
        self._put(b"STAT", struct.pack("<III", frame, first, len(values)) + values.tobytes())

    def tensor(self, frame: int, index: int, values: Array) -> None:
        """A tensor's own values."""
        self._put(b"TENS", (frame, index, values.copy()))

    def frame(self, index: int, facts: Mapping[str, Any]) -> None:
        """The frame is whole."""
        self._frames = index + 1
        self._json(b"FRAM", {"frame": index, **facts})

    def close(self) -> None:
        """Write the end; may be called twice.

        Raises:
            LogError: something could not be written, now or before.
        """
        if not self._closed:
            self._closed = True
            self._put(b"ENDS", struct.pack("<I", self._frames))
            if self._thread is not None:
                self._queue.put(None)
                self._thread.join()
            self._file.close()
        if isinstance(self._failed, OSError):
            raise LogError(f"cannot be written: {self._failed}", where=self._file.name)
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
            return  # whoever records goes on; `close` tells
        try:
            if tag == b"TENS":
                frame, index, values = content
                line = {"frame": frame, "tensor": index, "dtype": values.dtype.str}
                line["shape"] = list(values.shape)
                packed = zlib.compress(values.tobytes(), 1)
                content = json.dumps(line).encode() + b"\n" + packed
            self._file.write(_PIECE.pack(tag, len(content), zlib.crc32(content)) + content)
        except Exception as error:
            self._failed = error


@dataclass(frozen=True)
class Log:
    """A log to be read, frame by frame, in constant memory.

    Attributes:
        header: as it was written.
        layers: all tensors: the model's inputs, layers and outputs, and those named by taps.
        count: whole frames.
        damage: what is wrong with the file's end, in words; empty where nothing is.
    """

    path: Path
    header: dict[str, Any]
    layers: tuple[Layer, ...]
    count: int
    damage: str = ""

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Look through the log at `path`.

        Raises:
            LogError: there is none, it is no log, or a piece in its middle is damaged.
        """
        path = Path(path)
        header: dict[str, Any] | None = None
        layers: list[Layer] = []
        seen: set[int] = set()
        whole, damage, ended = 0, "", False
        for tag, content in _pieces(path):
            if tag == b"":
                damage = content.decode()
            elif header is None:
                header = _json(path, content) if tag == b"HEAD" else None
                if header is None or not isinstance(header.get("tensors"), list):
                    raise LogError("its first piece is no header", where=str(path))
                layers = [_layer(path, one) for one in header["tensors"]]
            elif tag == b"DECL":
                layers.append(_layer(path, _json(path, content)))
            elif tag == b"STAT" and len(content) >= _STAT.size:
                seen.add(_STAT.unpack_from(content)[0])
            elif tag == b"FRAM":
                whole += 1
            elif tag == b"ENDS":
                ended = True
        if header is None:
            raise LogError(
                f"has no header{': ' + damage if damage else ''}", where=str(path),
                remedy="record it again, and end recording with close() or a with block",
            )  # fmt: skip
        if not whole:  # a device writes no FRAM; its last frame is whole if the log was ended
            whole = len(seen) if ended or not seen else len(seen) - 1
        if not ended:
            damage = damage or "recording was not ended"
            damage = f"{damage}; {whole} whole frames are read"
        return cls(path, header, tuple(layers), whole, damage)

    def frames(self) -> Iterator[Frame]:
        """The whole frames, in order.

        Raises:
            LogError: a piece holds what no recorder writes.
        """
        try:
            yield from self._frames()
        except (
            ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error,
        ) as error:  # fmt: skip
            raise LogError(f"is damaged: {error!r:.200}", where=str(self.path)) from error

    def _frames(self) -> Iterator[Frame]:
        given = 0
        current: Frame | None = None
        marked = False
        for tag, content in _pieces(self.path):
            if tag in (b"STAT", b"TENS"):
                number = (
                    _STAT.unpack_from(content)[0]
                    if tag == b"STAT"
                    else json.loads(content[: content.index(b"\n")])["frame"]
                )
                if current is not None and current.index != number and not marked:
                    yield current
                    given += 1
                    current = None
                if given == self.count:
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
                given, current = given + 1, None
        if current is not None and not marked and given < self.count:
            yield current

    def _add_statistics(self, frame: Frame, content: bytes) -> None:
        _, first, count = _STAT.unpack_from(content)
        values = np.frombuffer(content, STATISTICS, offset=_STAT.size)
        if len(values) != count or first + count > len(self.layers):
            raise LogError(
                f"frame {frame.index} has tensors the header lacks", where=str(self.path)
            )
        frame.statistics[first : first + count] = values

    def _add_tensor(self, frame: Frame, content: bytes) -> None:
        line, _, packed = content.partition(b"\n")
        facts = json.loads(line)
        dtype, shape = np.dtype(facts["dtype"]), facts["shape"]
        size = min(math.prod(shape) * dtype.itemsize, _LARGEST_TENSOR)
        frame.tensors[facts["tensor"]] = np.frombuffer(expanded(packed, size), dtype).reshape(shape)


def _pieces(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Tag and contents of each piece; last, with an empty tag, what is wrong with the end."""
    with opened(path, LogError) as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise LogError(
                "is no log of slipstream xray", where=str(path),
                remedy="name a file that `xray.record` or a device wrote",
            )  # fmt: skip
        at = len(MAGIC)
        while head := file.read(_PIECE.size):
            cut = f"it is cut off at byte {at}"
            if len(head) < _PIECE.size:
                yield b"", cut.encode()
                return
            tag, size, crc = _PIECE.unpack(head)
            if size > _LARGEST or not tag.isalpha():
                raise LogError(f"is damaged at byte {at}: no piece begins there", where=str(path))
            content = file.read(size)
            if len(content) < size:
                yield b"", cut.encode()
                return
            if zlib.crc32(content) != crc:
                raise LogError(
                    f"is damaged at byte {at}: the check sum of a piece {tag.decode()} is wrong",
                    where=str(path), remedy="copy it from the device again",
                )  # fmt: skip
            at += _PIECE.size + size
            yield tag, content


def _json(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LogError(f"is damaged: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise LogError("is damaged: no JSON object", where=str(path))
    return value


def _layer(path: Path, described: Any) -> Layer:
    try:
        return Layer.from_dict(described)
    except (TypeError, ValueError, AttributeError) as error:
        raise LogError(f"describes a tensor wrongly: {error}", where=str(path)) from error


def model_layers(layers: Sequence[Layer]) -> list[int]:
    """Numbers of those that a model computes: no inputs, outputs, taps."""
    return [n for n, one in enumerate(layers) if one.kind not in ("input", "output", "tap")]
