"""The query sample library: samples, their labels, and the subset in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes import Runtime, fit
from slipstream.runtimes.runtime import Array
from slipstream.runtimes.samples import read_samples

# Maximum number of samples of a performance run; the rules set it per benchmark.
PERFORMANCE_SAMPLES = 1024


class Library:
    """Samples in the form that the model takes.

    Args:
        inputs: one array [N, ...] per input of the model.
        labels: int64 [N] classes; None without labels.

    Raises:
        InvalidArgumentError: no samples, or parts of different lengths.
    """

    def __init__(self, inputs: Sequence[Array], labels: Array | None = None) -> None:
        parts = [*inputs, *([] if labels is None else [labels])]
        lengths = {len(part) for part in parts}
        if len(lengths) != 1:
            raise InvalidArgumentError(
                "data", f"inputs and labels have different lengths: {sorted(lengths)}"
            )
        if not next(iter(lengths)):
            raise InvalidArgumentError("data", "there are no samples", remedy="pass at least one")
        self.inputs = [np.ascontiguousarray(array) for array in inputs]
        self.labels = labels
        self.performance_count = min(len(self), PERFORMANCE_SAMPLES)
        self.shuffle = 0
        """Seed with which `load` exchanges and permutes elements, for new samples of the same range
        and cost; 0 leaves samples unchanged."""
        self._loaded: list[Array] = []
        self._place: dict[int, int] = {}
        # Views of single samples, made once: slicing takes longer than a small model.
        self._single: dict[int, list[Array]] = {}

    def __len__(self) -> int:
        return len(self.inputs[0])

    @property
    def sample_bytes(self) -> int:
        """Bytes per sample."""
        return sum(array[:1].nbytes for array in self.inputs)

    def load(self, indices: Sequence[int]) -> None:
        """Copy samples into memory, before the clock starts."""
        self._loaded = [self._shuffled(array[list(indices)]) for array in self.inputs]
        self._place = {index: at for at, index in enumerate(indices)}
        self._single = {
            index: [array[at : at + 1] for array in self._loaded]
            for index, at in self._place.items()
        }

    def _shuffled(self, samples: Array) -> Array:
        flat = samples.reshape(len(samples), -1)
        if not self.shuffle or flat.shape[1] < 2:
            return samples
        random = np.random.default_rng(self.shuffle)
        places = random.permutation(flat.shape[1])
        if (np.diff(places) == 1).all():
            # The identity would leave the samples unchanged.
            places = np.roll(places, 1)
        mixed = flat[:, places]
        if len(flat) > 1:
            # A cache could use sorted elements as its key, which permutations leave unchanged.
            # So half of the places take elements of another sample.
            half = random.permutation(len(places))[: len(places) // 2]
            other = np.roll(flat, int(random.integers(1, len(flat))), axis=0)
            mixed[:, half] = other[:, places[half]]
        return np.ascontiguousarray(mixed).reshape(samples.shape)

    def unload(self, indices: Sequence[int]) -> None:
        """Free all loaded samples."""
        self._loaded, self._place, self._single = [], {}, {}

    def take(self, indices: Sequence[int]) -> list[Array]:
        """Return loaded samples as a batch, [len(indices), ...] per input."""
        if len(indices) == 1:
            return self._single[indices[0]]
        places = list(itemgetter(*indices)(self._place))
        return [array[places] for array in self._loaded]

    def accuracy(self, answers: Mapping[int, int]) -> float | None:
        """Return the share of answers that equal the label; None without labels."""
        if self.labels is None:
            return None
        return float(np.mean([self.labels[index] == found for index, found in answers.items()]))


def open_library(
    source: str | None,
    model: Runtime,
    value_range: tuple[float, float] | None = None,
    limit: int | None = None,
) -> Library:
    """Read samples in the form that `model` takes.

    Args:
        source: see `slipstream.runtimes.samples.read_samples`.
        value_range: values to which 0 and 255 are mapped (`slipstream.runtimes.fit`).
        limit: maximum number of samples.

    Raises:
        SlipstreamError: there are no such data, or they do not fit the model.
    """
    inputs, labels = read_samples(source, model)
    if limit is not None:
        inputs = [array[:limit] for array in inputs]
        labels = None if labels is None else labels[:limit]
    specs = [*model.inputs] or [None] * len(inputs)  # type: ignore[list-item]
    if len(specs) != len(inputs):
        raise InvalidArgumentError(
            "data", f"samples have {len(inputs)} inputs; the model takes {len(specs)}"
        )
    if not len(inputs[0]):
        raise InvalidArgumentError("data", f"{source} has no samples", remedy="pass at least one")
    fitted = [fit(array, spec, value_range) for array, spec in zip(inputs, specs, strict=True)]
    return Library(fitted, labels)
