"""Kinds of data that `get` returns, as frozen dataclasses of NumPy arrays and text.

Arrays are C-contiguous and owned by the caller; nothing is cached between calls. Dimensions: N
examples, H and W pixels, T time, F fields, U users, I items.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.data.errors import CorruptDataError
from slipstream.errors import InvalidArgumentError, UnknownNameError

Split = Literal["train", "validation", "test"]

# Maximum unpacked size of a trace, a few times that of the largest real one.
_MAX_TRACE_BYTES = 1 << 30


@dataclass(frozen=True)
class Dataset:
    """Base class of data sets; `name` is the name in the catalogue."""

    name: str


@dataclass(frozen=True)
class Text(Dataset):
    """Running text. A split that the set does not have is the empty string."""

    train: str
    validation: str
    test: str = ""

    def as_bytes(self, split: Split = "train") -> NDArray[np.uint8]:
        """Return a split as UTF-8, uint8 [bytes], for models of 256 byte values."""
        if split not in ("train", "validation", "test"):
            raise InvalidArgumentError("split", f"'{split}' is not train, validation or test")
        text: str = getattr(self, split)
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).copy()


@dataclass(frozen=True)
class Sentences:
    """Parallel sentences: `target[i]` translates `source[i]`; tokens are separated by spaces."""

    source: tuple[str, ...]
    target: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class Pairs(Dataset):
    """A translation corpus; languages are two-letter codes."""

    source_language: str
    target_language: str
    train: Sentences
    validation: Sentences
    test: Sentences


@dataclass(frozen=True)
class Tree:
    """A binary tree with its nodes in postorder: children precede parents, and the root is last.

    Attributes:
        labels: class of each node, int64 [n].
        left, right: indices of the children, int64 [n]; -1 at leaves.
        words: word of each node; empty at inner nodes.
    """

    labels: NDArray[np.int64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    words: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.words)

    @property
    def sentence(self) -> str:
        """Words of the leaves from left to right, joined with spaces."""
        return " ".join(word for word in self.words if word)


@dataclass(frozen=True)
class Trees(Dataset):
    """Sentences as labelled parse trees; `classes` names the labels 0, 1, ..."""

    train: tuple[Tree, ...]
    validation: tuple[Tree, ...]
    test: tuple[Tree, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Images(Dataset):
    """Decoded images of one size.

    Attributes:
        images: uint8 [N, H, W] (grey) or [N, H, W, 3] (RGB), 0 black to 255 white.
        labels: int64 [N], indices into `classes`; -1 if the set has no labels.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class EncodedImages(Dataset):
    """Encoded image files, for the study of decoders and codecs.

    Attributes:
        files: bytes of one JPEG file per image.
        labels: int64 [N], indices into `classes`.
    """

    files: tuple[bytes, ...]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.files)


@dataclass(frozen=True)
class Tabular(Dataset):
    """Rows of measurements.

    Attributes:
        features: float64 [N, F].
        targets: float64 [N]; class indices unless `classes` is empty.
        feature_names: one name per feature.
    """

    features: NDArray[np.float64]
    targets: NDArray[np.float64]
    feature_names: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Ratings(Dataset):
    """Explicit feedback, in the order of the file.

    Attributes:
        users, items: int64 [N], from 0 to U - 1 and I - 1, in the order of the original ids.
        ratings: float32 [N], in stars.
        timestamps: int64 [N], seconds since 1970 (UTC).
        user_ids, item_ids: int64 [U] and [I], the ids in the file.
        titles: one title per item; empty if the set has none.
    """

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    ratings: NDArray[np.float32]
    timestamps: NDArray[np.int64]
    user_ids: NDArray[np.int64]
    item_ids: NDArray[np.int64]
    titles: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ratings)


@dataclass(frozen=True)
class ClickRows:
    """Examples for click prediction.

    Attributes:
        ids: int64 [N, F], one id per categorical field, starting at 0 in each field.
        dense: float32 [N, D], numeric fields; NaN if missing; D may be 0.
        labels: int64 [N], 1 for a click, else 0.
    """

    ids: NDArray[np.int64]
    dense: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Clicks(Dataset):
    """Click logs; `cardinalities[f]` is one more than the largest possible id of field f."""

    train: ClickRows
    test: ClickRows
    cardinalities: tuple[int, ...]
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Audio(Dataset):
    """Mono recordings.

    Attributes:
        samples: one array int16 [T] per recording, of different lengths.
        labels: int64 [N], indices into `classes`.
        speakers: one name per recording.
        repetitions: int64 [N], number of the take of the same speaker and word.
        rate_hz: samples per second.
    """

    samples: tuple[NDArray[np.int16], ...]
    labels: NDArray[np.int64]
    speakers: tuple[str, ...]
    repetitions: NDArray[np.int64]
    classes: tuple[str, ...]
    rate_hz: int

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class Traces(Dataset):
    """Profiler traces in the Chrome format, read individually because some are large."""

    paths: Mapping[str, Path]

    def read(self, trace: str) -> dict[str, Any]:
        """Read a trace: a JSON object with ``traceEvents`` and other fields of the profiler.

        Raises:
            UnknownNameError: there is no trace with this name.
            CorruptDataError: the file is not a gzipped JSON object, or unpacks to over 1 GiB.
        """
        if trace not in self.paths:
            raise UnknownNameError("trace", trace, self.paths)
        path = self.paths[trace]
        try:
            with gzip.open(path) as file:
                content = file.read(_MAX_TRACE_BYTES + 1)
            if len(content) > _MAX_TRACE_BYTES:
                raise CorruptDataError(self.name, "unpacks to over 1 GiB", where=str(path))
            parsed = json.loads(content.decode("utf-8"))
        except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
            raise CorruptDataError(self.name, f"not a trace: {error}", where=str(path)) from error
        if not isinstance(parsed, dict):
            raise CorruptDataError(self.name, "the trace is not a JSON object", where=str(path))
        return parsed


@dataclass(frozen=True)
class Accesses(Dataset):
    """Sequence of accesses to a cache.

    Attributes:
        trace: name of the trace in the set.
        keys: uint64 [N], requested blocks or objects.
        sizes: int64 [N], in bytes; None if the trace has no sizes.
        times: int64 [N], non-decreasing, in ticks of the trace; None if the trace has no times.
    """

    trace: str
    keys: NDArray[np.uint64]
    sizes: NDArray[np.int64] | None
    times: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class ProfiledLayer:
    """One layer at one batch size; times are medians of the layer in isolation.

    Attributes:
        layer: type of the layer, for example ``conv2d``.
        settings: arguments of the layer, such as channels and kernel size.
        batch: number of examples on the device.
        shape: shape of one input example.
        total_ms, forward_us, backward_us: as in the file; the total is not exactly the sum.
    """

    layer: str
    settings: Mapping[str, Any]
    batch: int
    shape: tuple[int, ...]
    total_ms: float
    forward_us: int
    backward_us: int


@dataclass(frozen=True)
class LayerProfile(Dataset):
    """A model profiled layer by layer, at the batch sizes of several device counts.

    Attributes:
        layers: in the order of the model, grouped by batch size.
        step_ms: sum over the layers by batch size, as in the file.
    """

    device: str
    layers: tuple[ProfiledLayer, ...]
    step_ms: Mapping[int, float]


@dataclass(frozen=True)
class ModelFiles(Dataset):
    """Model files, to be opened by a runtime; `paths` are by file stem."""

    paths: Mapping[str, Path]
    classes: tuple[str, ...] = ()
