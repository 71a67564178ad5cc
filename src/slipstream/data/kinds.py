"""The values `get` returns: one frozen dataclass a kind of data, all of it NumPy and text.

Arrays are C-contiguous and belong to the caller; nothing is cached between calls. Letters in
shapes: N examples, H and W pixels, T time, F fields, U users, I items.
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

# A compressed trace may not unpack to more than this: a few times the largest real one.
_MOST_TRACE_BYTES = 1 << 30


@dataclass(frozen=True)
class Dataset:
    """What every kind has. `name` is the catalogue's."""

    name: str


@dataclass(frozen=True)
class Text(Dataset):
    """Running text. A split that the set does not have is the empty string."""

    train: str
    validation: str
    test: str = ""

    def as_bytes(self, split: Split = "train") -> NDArray[np.uint8]:
        """The split as UTF-8, uint8 [bytes]: a vocabulary of 256 that needs no tokeniser."""
        if split not in ("train", "validation", "test"):
            raise InvalidArgumentError("split", f"'{split}' is not train, validation or test")
        text: str = getattr(self, split)
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).copy()


@dataclass(frozen=True)
class Documents(Dataset):
    """Texts with one topic each.

    Attributes:
        train, test: one string a document.
        train_labels, test_labels: int64 [N], indices into `classes`.
    """

    train: tuple[str, ...]
    train_labels: NDArray[np.int64]
    test: tuple[str, ...]
    test_labels: NDArray[np.int64]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Sentences:
    """Aligned sentences: `source[i]` means the same as `target[i]`; tokens are space-separated."""

    source: tuple[str, ...]
    target: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class Pairs(Dataset):
    """A translation corpus. Languages are two-letter codes."""

    source_language: str
    target_language: str
    train: Sentences
    validation: Sentences
    test: Sentences


@dataclass(frozen=True)
class Tree:
    """One binary tree; nodes in postorder, so that children precede parents and the root is last.

    Attributes:
        labels: int64 [n], the class of each node.
        left, right: int64 [n], indices of the children; -1 at a leaf.
        words: one a node; empty at inner nodes.
    """

    labels: NDArray[np.int64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    words: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.words)

    @property
    def sentence(self) -> str:
        """The leaves from left to right, joined with spaces."""
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
        labels: int64 [N], indices into `classes`; -1 where the set has no labels.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class EncodedImages(Dataset):
    """Images as the files they came in, for decoders and codecs under study.

    Attributes:
        files: the bytes of one JPEG each.
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
        targets: float64 [N]; a class index where `classes` is not empty.
        feature_names: [F].
    """

    features: NDArray[np.float64]
    targets: NDArray[np.float64]
    feature_names: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Ratings(Dataset):
    """Explicit feedback, in the order of the file.

    Attributes:
        users, items: int64 [N], 0..U-1 and 0..I-1 in the order of the original ids.
        ratings: float32 [N], in stars.
        timestamps: int64 [N], seconds since 1970 (UTC).
        user_ids, item_ids: int64 [U] and [I], the ids in the file.
        titles: one an item, or empty where the set has none.
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
class Interactions(Dataset):
    """Implicit feedback: who took what, sorted by user, then item.

    Attributes:
        users, items: int64 [N], the training pairs.
        test_users, test_items: int64 [M], held out; no pair is in both.
        user_count, item_count: U and I.
    """

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    test_users: NDArray[np.int64]
    test_items: NDArray[np.int64]
    user_count: int
    item_count: int

    def __len__(self) -> int:
        return len(self.users)


@dataclass(frozen=True)
class ClickRows:
    """Examples for click prediction.

    Attributes:
        ids: int64 [N, F], one id a categorical field, each field counted from 0.
        dense: float32 [N, D], numeric fields; NaN where missing; D may be 0.
        labels: int64 [N], 1 clicked, 0 not.
    """

    ids: NDArray[np.int64]
    dense: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Clicks(Dataset):
    """Click logs; `cardinalities[f]` is one more than the largest id field f may hold."""

    train: ClickRows
    test: ClickRows
    cardinalities: tuple[int, ...]
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Audio(Dataset):
    """Recordings of one channel.

    Attributes:
        samples: int16 [T] each, of different lengths.
        labels: int64 [N], indices into `classes`.
        speakers: one name a recording.
        repetitions: int64 [N], which take of the same speaker and word.
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
    """Profiler traces in the Chrome format, read one at a time because some are large."""

    paths: Mapping[str, Path]

    def read(self, trace: str) -> dict[str, Any]:
        """The JSON object of one trace: ``traceEvents`` and what the profiler wrote beside it.

        Raises:
            UnknownNameError: no such trace.
            CorruptDataError: not gzip, not JSON, no object, or more than 1 GiB unpacked.
        """
        if trace not in self.paths:
            raise UnknownNameError("trace", trace, self.paths)
        path = self.paths[trace]
        try:
            with gzip.open(path) as file:
                content = file.read(_MOST_TRACE_BYTES + 1)
            if len(content) > _MOST_TRACE_BYTES:
                raise CorruptDataError(self.name, "more than 1 GiB unpacked", where=str(path))
            parsed = json.loads(content.decode("utf-8"))
        except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
            raise CorruptDataError(self.name, f"no trace: {error}", where=str(path)) from error
        if not isinstance(parsed, dict):
            raise CorruptDataError(self.name, "no JSON object", where=str(path))
        return parsed


@dataclass(frozen=True)
class Accesses(Dataset):
    """What a cache was asked for, in order.

    Attributes:
        trace: which of the set's traces.
        keys: uint64 [N], the block or object asked for.
        sizes: int64 [N], bytes; None where the trace does not say.
        times: int64 [N], in the trace's own ticks, never falling; None where it does not say.
    """

    trace: str
    keys: NDArray[np.uint64]
    sizes: NDArray[np.int64] | None
    times: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class TrainingRuns:
    """Repeated runs of one benchmark on one system until its quality target. Times in seconds.

    Attributes:
        evaluations: how many evaluations each of the first four runs took to reach it.
    """

    system: str
    benchmark: str
    runs: int
    fastest_s: float
    median_s: float
    slowest_s: float
    olympic_mean_s: float
    global_batch: int
    evaluations: tuple[int, ...]


@dataclass(frozen=True)
class TrainingSteps:
    """One run taken apart: `blocks` of `epochs_per_block` epochs between evaluations.

    Attributes:
        run_s, train_s: the run, and the part of it between first and last block.
        block_ms, first_block_ms: the median block, and the first one, which compiles.
        step_ms: one optimizer step; None where the log does not allow it.
        samples: training examples in an epoch.
    """

    system: str
    benchmark: str
    run_s: float
    train_s: float
    blocks: int
    epochs_per_block: float
    block_ms: float
    first_block_ms: float
    global_batch: int
    samples: int
    step_ms: float | None


@dataclass(frozen=True)
class TrainingTimes(Dataset):
    """Times to train from public result logs."""

    runs: tuple[TrainingRuns, ...]
    steps: tuple[TrainingSteps, ...]


@dataclass(frozen=True)
class ProfiledLayer:
    """One layer at one batch size. Times are medians of that layer alone.

    Attributes:
        layer: the layer's type, as ``conv2d``.
        settings: its arguments (channels, kernel size, ...).
        batch: examples on this device.
        shape: of one input example.
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
        layers: in the order of the model, one batch size after the other.
        step_ms: by batch size, the sum over the layers as the profile states it.
    """

    device: str
    layers: tuple[ProfiledLayer, ...]
    step_ms: Mapping[int, float]


@dataclass(frozen=True)
class ModelFiles(Dataset):
    """Models as files, for runtimes that open them themselves. `paths` goes by file stem."""

    paths: Mapping[str, Path]
    classes: tuple[str, ...] = ()
