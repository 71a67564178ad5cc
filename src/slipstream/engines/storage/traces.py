"""Traces of storage requests as columns, with the context of each request."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from slipstream.engines.storage.policies import Int32s, Int64s
from slipstream.engines.storage.tokens import Context, ContextClasses
from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.files import read_arrays, replacing

_T = TypeVar("_T")
OPS = ("open", "read", "write", "create", "delete")
_COLUMNS = {
    "time_ns": np.int64, "objects": np.int32, "sizes": np.int64, "ops": np.uint8,
    "contexts": np.int32,
}  # fmt: skip


def distinct(items: Iterable[_T]) -> tuple[tuple[_T, ...], Int32s]:
    """Return distinct items in order of appearance, and the number of each item, int32 [N]."""
    numbers: dict[_T, int] = {}
    column = np.fromiter((numbers.setdefault(item, len(numbers)) for item in items), np.int32)
    return tuple(numbers), column


class TraceError(SlipstreamError):
    """A trace is malformed; `where` is its file with the line or byte."""


@dataclass(frozen=True, eq=False)
class AccessTrace:
    """Requests in order of time.

    Attributes:
        time_ns: int64 [N], non-decreasing; positions from 0 if times are unknown.
        objects: int32 [N], numbers of objects from 0.
        sizes: int64 [N], size of the object in bytes.
        ops: uint8 [N], indices of `OPS`.
        contexts: int32 [N], indices of `context_texts`.
        names: by number of an object; empty if they were numbers.
        context_texts: distinct contexts; at least one, ``()`` if there is none.
        notes: counts of what was corrected or skipped while the trace was read.
    """

    time_ns: Int64s
    objects: Int32s
    sizes: Int64s
    ops: npt.NDArray[np.uint8]
    contexts: Int32s
    names: tuple[str, ...] = ()
    context_texts: tuple[Context, ...] = ((),)
    notes: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.objects.size

    @classmethod
    def of(
        cls,
        objects: Sequence[str],
        sizes: npt.ArrayLike,
        *,
        time_ns: npt.ArrayLike | None = None,
        ops: npt.ArrayLike | None = None,
        contexts: Iterable[Mapping[str, str]] | None = None,
        notes: Mapping[str, int] | None = None,
    ) -> AccessTrace:
        """Build a trace from the name, size in bytes and optional columns of each request.

        Times that decrease are raised to the latest one before, and counted in `notes`.

        Raises:
            InvalidArgumentError: a column has another length or is not of integers, or a size is
                negative.
        """
        names, column = distinct(objects)
        texts, of_request = distinct(tuple(sorted(each.items())) for each in contexts or ())
        return cls.checked(
            column, sizes, time_ns, ops, None if contexts is None else of_request,
            names=names, context_texts=texts or ((),), notes=notes,
        )  # fmt: skip

    @classmethod
    def checked(
        cls,
        objects: npt.NDArray[np.int32],
        sizes: npt.ArrayLike,
        time_ns: npt.ArrayLike | None = None,
        ops: npt.ArrayLike | None = None,
        contexts: npt.ArrayLike | None = None,
        *,
        names: tuple[str, ...] = (),
        context_texts: tuple[Context, ...] = ((),),
        notes: Mapping[str, int] | None = None,
    ) -> AccessTrace:
        """Build a trace from columns [N]; see `of` for times that decrease and errors."""
        count = objects.size
        columns: dict[str, Any] = {
            "time_ns": np.arange(count) if time_ns is None else time_ns, "objects": objects,
            "sizes": sizes, "ops": np.ones(count) if ops is None else ops,
            "contexts": np.zeros(count) if contexts is None else contexts,
        }  # fmt: skip
        for name, kind in _COLUMNS.items():
            try:
                with np.errstate(invalid="raise"):
                    column = columns[name] = np.ascontiguousarray(columns[name], kind)
            except (ArithmeticError, TypeError, ValueError) as error:
                raise InvalidArgumentError(name, f"is not of integers: {error}") from error
            if column.shape != (count,):
                raise InvalidArgumentError(name, f"has shape {column.shape}, not ({count},)")
        for name, limit in (("ops", len(OPS)), ("contexts", len(context_texts))):
            if count and not 0 <= columns[name].min() <= columns[name].max() < limit:
                raise InvalidArgumentError(name, f"has an index outside 0 to {limit - 1}")
        if count and min(columns["sizes"].min(), columns["objects"].min()) < 0:
            raise InvalidArgumentError("sizes", "a size or object number is negative")
        if names and count and columns["objects"].max() >= len(names):
            raise InvalidArgumentError("objects", f"has a number without one of {len(names)} names")
        counts = Counter(notes)
        if backwards := int(np.count_nonzero(np.diff(columns["time_ns"]) < 0)):
            counts["clock jumps"] += backwards
            columns["time_ns"] = np.maximum.accumulate(columns["time_ns"])
        return cls(**columns, names=names, context_texts=context_texts, notes=dict(counts))

    def classes(self) -> tuple[Int32s, list[Context]]:
        """Return the class of context of each request, int32 [N], and the tokens of each class.

        Objects' names belong to their contexts: they are the key ``object``.
        """
        count = max(len(self.names), 1)
        pair = self.contexts.astype(np.int64) * count + (self.objects if self.names else 0)
        pairs, inverse = np.unique(pair, return_inverse=True)
        classes, numbers = ContextClasses(), []
        for context, name in zip(*np.divmod(pairs, count), strict=True):
            extra = (("object", self.names[name]),) if self.names else ()
            numbers.append(classes.number((*self.context_texts[context], *extra)))
        return np.array(numbers, np.int32)[inverse], classes.tokens

    @property
    def object_bytes(self) -> Int64s:
        """Size of each object at its first request, int64 [objects]."""
        present, first = np.unique(self.objects, return_index=True)
        sizes = np.zeros(int(present.max(initial=-1)) + 1, np.int64)
        sizes[present] = self.sizes[first]
        return sizes

    def first(self, count: int) -> AccessTrace:
        """Return the first `count` requests."""
        return self.select(np.arange(min(count, len(self))))

    def select(self, chosen: npt.NDArray[Any]) -> AccessTrace:
        """Return the requests of a mask or of positions."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in _COLUMNS})

    def save(self, path: Path) -> None:
        """Write the trace as ``.npz``.

        Raises:
            TraceError: the file cannot be written.
        """
        text = json.dumps(
            {"names": self.names, "contexts": self.context_texts, "notes": self.notes}
        )
        columns = {name: getattr(self, name) for name in _COLUMNS}
        blob = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        try:
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.savez_compressed(file, text=blob, **columns)
        except OSError as error:
            raise TraceError(
                f"the trace cannot be written: {error.strerror}", where=str(path),
                remedy="name another file",
            ) from error  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> AccessTrace:
        """Read a trace that `save` wrote.

        Raises:
            TraceError: the file does not exist, is damaged, or is not such a trace.
        """
        arrays = read_arrays(path, TraceError)
        try:
            text = json.loads(arrays["text"].tobytes().decode("utf-8", "surrogatepass"))
            contexts = tuple(
                tuple((str(key), str(value)) for key, value in context)
                for context in text["contexts"]
            )
            columns = [arrays[name] for name in ("sizes", "time_ns", "ops", "contexts")]
            return cls.checked(
                arrays["objects"], *columns,
                names=tuple(map(str, text["names"])), context_texts=contexts,
                notes={str(key): int(value) for key, value in text["notes"].items()},
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as damage:
            raise TraceError(
                f"is not a trace of storage requests: {damage}", where=str(path),
                remedy="write one with `slipstream storage import` or `slipstream storage record`",
            ) from damage  # fmt: skip
