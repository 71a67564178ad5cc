"""Predict instability from a sample of scenes.

The reference runs on all scenes; each scene's margin is the lead of its class over the next. The
paths run on a sample only: half of it the scenes with the smallest margins, which decide most of
the instability and are thus measured, half drawn from the remaining ones to show how margins shift.
A remaining scene changes with the probability that such a shift exceeds its margin. For all paths
together, a shift is that of one drawn scene on every path, which keeps errors that paths share. For
one path, shifts of all paths are pooled and scaled to that path, because its own are too few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.runtimes.paths import DeviceMatrix
from slipstream.ship.stability.measuring import (
    Models,
    Report,
    Scenes,
    checked_labels,
    lead_margins,
    scores,
)
from slipstream.tables import Field, Table
from slipstream.units import format_percent

Margins = NDArray[np.float64]


@dataclass(frozen=True)
class Forecast:
    """Predicted instability.

    Attributes:
        names: names of the paths.
        total: share of scenes on which any paths disagree; divergence without labels.
        pairs: of the reference and each path, [E].
        items, sample: number of scenes, and of those that the paths ran on.
        labelled: whether values are instability; without labels they are divergence.
    """

    names: tuple[str, ...]
    total: float
    pairs: NDArray[np.float64]
    items: int
    sample: int
    labelled: bool

    def tables(self) -> list[Table]:
        """Return a table with a row per path."""
        measure = "instability" if self.labelled else "divergence"
        order = [int(path) for path in np.argsort(-self.pairs, kind="stable")]
        cells: tuple[Field[int], ...] = (
            Field.of("path", lambda e: self.names[e]),
            Field.number(
                f"{measure} with the reference", lambda e: format_percent(float(self.pairs[e]))
            ),
        )
        note = (
            f"Simulated: {self.items} scenes on the reference, {self.sample} of them on the "
            f"{len(self.names)} paths. Together: {format_percent(self.total)} {measure}."
        )
        return [Table.of(order, cells, f"Forecast of {measure}", [note])]

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the tables."""
        return {
            "measure": "instability" if self.labelled else "divergence",
            "total": self.total,
            "pairs": dict(zip(self.names, self.pairs.tolist(), strict=True)),
            "items": self.items,
            "sample": self.sample,
            "provenance": "simulated",
        }


def predict(
    models: Models,
    scenes: Scenes,
    matrix: DeviceMatrix,
    labels: Sequence[int] | NDArray[np.int64] | None = None,
    *,
    sample: int = 64,
    seed: int = 0,
    report: Report = lambda line: None,
) -> Forecast:
    """Predict the instability of `matrix` from a few scenes.

    Args:
        models, scenes, labels: as for `measure`.
        sample: number of scenes that the paths run on.
        seed: seed of the sample.
    """
    targets = checked_labels(labels, len(scenes))
    chunks = scores(models, scenes, [matrix.reference], report=report)
    reference = np.concatenate([chunk[0][1] for chunk in chunks])
    classes = reference.argmax(1) if targets is None else targets
    margins = lead_margins(reference, classes)
    chosen, drawn = _chosen(margins, sample, seed)
    chunks = scores(models, [scenes[n] for n in chosen], list(matrix.paths), report=report)
    moved = np.concatenate(
        [np.stack([path for _, path in chunk]) for chunk in chunks], 1
    )  # [E, sample, C]
    seen = np.stack([lead_margins(path, classes[chosen]) for path in moved])
    shifts = seen[:, drawn] - margins[chosen[drawn]]
    remaining = np.setdiff1d(np.arange(len(scenes)), chosen)
    # [E, remaining, drawn]: each remaining scene, shifted as each drawn one.
    predicted = (margins[remaining][None, :, None] + shifts[:, None, :]) > 0
    total = (seen > 0).any(0) & ~(seen > 0).all(0)
    changed = predicted.any(0) & ~predicted.all(0)
    pairs = ((seen > 0) != (margins[chosen] > 0)).sum(1) + _changed(
        seen - margins[chosen], margins[remaining]
    )
    return Forecast(
        tuple(path.name for path in matrix.paths),
        float(total.sum() + changed.mean(1).sum()) / len(scenes),
        np.asarray(pairs / len(scenes)), len(scenes), len(chosen), targets is not None,
    )  # fmt: skip


def _changed(moved: Margins, margins: Margins) -> Margins:
    """Return the expected sign changes of `margins` [N] per path, for shifts [E, seen]."""
    sizes = np.sqrt(np.mean(moved**2, axis=1, keepdims=True))
    shape = np.sort((moved / np.where(sizes > 0, sizes, 1.0)).ravel())
    # A positive margin changes sign with a shift of at most -margin, others with one above it.
    below = np.searchsorted(shape, -margins / np.where(sizes > 0, sizes, np.inf), side="right")
    share = below / len(shape)
    changed: Margins = np.where(margins > 0, share, 1.0 - share).sum(1)
    return np.where(sizes[:, 0] > 0, changed, 0.0)


def _chosen(
    margins: Margins, sample: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the sampled scenes, and which of them were drawn at random."""
    order = np.argsort(np.abs(margins), kind="stable")
    near = order[: sample // 2]
    others = order[len(near) :]
    drawn = np.random.default_rng(seed).permutation(others)[: max(sample - len(near), 1)]
    chosen = np.concatenate([near, drawn])
    return chosen, np.arange(len(chosen)) >= len(near)
