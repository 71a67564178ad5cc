"""The query sample library: samples with their labels, and which of them are in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes import Runtime, fit
from slipstream.runtimes.runtime import Array
from slipstream.runtimes.samples import read_samples

# Samples that a performance run draws from, at most; the rules name a number for each benchmark.
PERFORMANCE_SAMPLES = 1024


class Library:
    """Samples as the model takes them.

    Args:
        inputs: one array a part of a sample, each [N, ...].
        labels: int64 [N] classes; None where there are none, and accuracy is not known.

    Raises:
        InvalidArgumentError: no samples, or parts of different lengths.
    """

    def __init__(self, inputs: Sequence[Array], labels: Array | None = None) -> None:
        lengths = {len(one) for one in inputs} | ({len(labels)} if labels is not None else set())
        if len(lengths) != 1:
            raise InvalidArgumentError("data", f"parts of {sorted(lengths)} samples")
        if not next(iter(lengths)):
            raise InvalidArgumentError("data", "there are no samples", remedy="one at least")
        self.inputs = [np.ascontiguousarray(one) for one in inputs]
        self.labels = labels
        self.performance_count = min(len(self), PERFORMANCE_SAMPLES)
        self.shuffle = 0
        """Seed by which samples exchange elements and permute them when they are loaded, for new
        content of the same range and cost; 0 leaves samples unchanged."""
        self._loaded: list[Array] = []
        self._place: dict[int, int] = {}
        # A sample by itself is a view, made once: cutting it out takes longer than a small model.
        self._single: dict[int, list[Array]] = {}

    def __len__(self) -> int:
        return len(self.inputs[0])

    @property
    def sample_bytes(self) -> int:
        """Of one sample, as the model takes it."""
        return sum(one[:1].nbytes for one in self.inputs)

    def load(self, indices: Sequence[int]) -> None:
        """Copy these samples into memory of their own, before the clock runs."""
        self._loaded = [self._shuffled(one[list(indices)]) for one in self.inputs]
        self._place = {index: at for at, index in enumerate(indices)}
        self._single = {
            index: [one[at : at + 1] for one in self._loaded] for index, at in self._place.items()
        }

    def _shuffled(self, samples: Array) -> Array:
        flat = samples.reshape(len(samples), -1)
        if not self.shuffle or flat.shape[1] < 2:
            return samples
        random = np.random.default_rng(self.shuffle)
        places = random.permutation(flat.shape[1])
        if (np.diff(places) == 1).all():
            # Never the original order.
            places = np.roll(places, 1)
        mixed = flat[:, places]
        if len(flat) > 1:
            # A permutation alone leaves each sample's sorted elements, which a cache can use as
            # its key: half of the places take the elements of another sample.
            half = random.permutation(len(places))[: len(places) // 2]
            other = np.roll(flat, int(random.integers(1, len(flat))), axis=0)
            mixed[:, half] = other[:, places[half]]
        return np.ascontiguousarray(mixed).reshape(samples.shape)

    def unload(self, indices: Sequence[int]) -> None:
        """Forget them."""
        self._loaded, self._place, self._single = [], {}, {}

    def take(self, indices: Sequence[int]) -> list[Array]:
        """Loaded samples as a batch, [len(indices), ...] each."""
        if len(indices) == 1:
            return self._single[indices[0]]
        places = list(itemgetter(*indices)(self._place))
        return [one[places] for one in self._loaded]

    def accuracy(self, answers: Mapping[int, int]) -> float | None:
        """The share of samples whose class is right; None without labels."""
        if self.labels is None:
            return None
        return float(np.mean([self.labels[index] == one for index, one in answers.items()]))


def open_library(
    source: str | None,
    model: Runtime,
    value_range: tuple[float, float] | None = None,
    limit: int | None = None,
) -> Library:
    """The samples that a command names, as `model` takes them.

    Args:
        source: a data set of `slipstream.data` with images or rows; an ``.npz`` with ``x`` and
            perhaps ``y``; ``file.py:function``, which returns (x, y) or x, x an array or several;
            None for the batch of the workload that `model` was built from.
        value_range: what 0 and 255 become (`slipstream.runtimes.fit`).
        limit: only the first so many.

    Raises:
        SlipstreamError: there are no such data, or they do not fit the model.
    """
    inputs, labels = read_samples(source, model)
    if limit is not None:
        inputs = [one[:limit] for one in inputs]
        labels = None if labels is None else labels[:limit]
    specs = [*model.inputs] or [None] * len(inputs)  # type: ignore[list-item]
    if len(specs) != len(inputs):
        raise InvalidArgumentError(
            "data", f"samples have {len(inputs)} parts, and the model takes {len(specs)}"
        )
    if not len(inputs[0]):
        raise InvalidArgumentError("data", f"{source} has no samples", remedy="one at least")
    fitted = [fit(one, spec, value_range) for one, spec in zip(inputs, specs, strict=True)]
    return Library(fitted, labels)
