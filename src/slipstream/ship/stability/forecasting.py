"""Instability told before every path has answered for every scene.

The reference answers once for all scenes; what counts is how far each answer is from another one,
its margin. The paths answer for a few scenes only: half of them those whose margins are the
smallest, which decide most of the instability and are then known, half drawn from the others, which
show how margins move. The others' chance to change is that of such a movement to exceed their
margin. Of all paths together, a movement is one of the drawn scenes' on every path, so that paths
that err alike do. Of one path, it is any that was seen on any path, as large as this path's are: a
path's own are too few to tell it from the next.
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
    Say,
    Scenes,
    checked_labels,
    leads,
    scores,
)
from slipstream.tables import Field, Table
from slipstream.units import format_percent

Margins = NDArray[np.float64]


@dataclass(frozen=True)
class Forecast:
    """What instability to expect.

    Attributes:
        names: of the paths.
        total: of all paths together, share of scenes; divergence where there are no labels.
        pairs: of the reference and each path, [E].
        items, sample: scenes, and those that the paths answered for.
        labelled: whether it is instability or divergence.
    """

    names: tuple[str, ...]
    total: float
    pairs: NDArray[np.float64]
    items: int
    sample: int
    labelled: bool

    def tables(self) -> list[Table]:
        """A line a path."""
        what = "instability" if self.labelled else "divergence"
        order = [int(one) for one in np.argsort(-self.pairs, kind="stable")]
        cells: tuple[Field[int], ...] = (
            Field.of("path", lambda e: self.names[e]),
            Field.number(
                f"{what} with the reference", lambda e: format_percent(float(self.pairs[e]))
            ),
        )
        note = (
            f"Simulated: {self.items} scenes on the reference, {self.sample} of them on the "
            f"{len(self.names)} paths. Together: {format_percent(self.total)} {what}."
        )
        return [Table.of(order, cells, f"Forecast of {what}", [note])]

    def to_json(self) -> dict[str, Any]:
        """Everything the tables are made of."""
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
    say: Say = lambda line: None,
) -> Forecast:
    """Forecast the instability of `matrix` from a few scenes.

    Args:
        models, scenes, labels: as `measure` takes them.
        sample: scenes that the paths answer for.
        seed: of their choice.

    Raises:
        as `measure`.
    """
    wanted = checked_labels(labels, len(scenes))
    given = [one[0][1] for one in scores(models, scenes, [matrix.reference], say=say)]
    reference = np.concatenate(given)
    classes = reference.argmax(1) if wanted is None else wanted
    margins = leads(reference, classes)
    chosen, drawn = _chosen(margins, sample, seed)
    taken = scores(models, [scenes[n] for n in chosen], list(matrix.paths), say=say)
    moved = np.concatenate(
        [np.stack([path for _, path in chunk]) for chunk in taken], 1
    )  # [E, sample, C]
    seen = np.stack([leads(path, classes[chosen]) for path in moved])
    shifts = seen[:, drawn] - margins[chosen[drawn]]
    rest = np.setdiff1d(np.arange(len(scenes)), chosen)
    # [E, rest, drawn]: each of the others, moved as each of the drawn ones was.
    told = (margins[rest][None, :, None] + shifts[:, None, :]) > 0
    total = (seen > 0).any(0) & ~(seen > 0).all(0)
    other = told.any(0) & ~told.all(0)
    pairs = ((seen > 0) != (margins[chosen] > 0)).sum(1) + _changed(
        seen - margins[chosen], margins[rest]
    )
    return Forecast(
        tuple(one.name for one in matrix.paths),
        float(total.sum() + other.mean(1).sum()) / len(scenes),
        np.asarray(pairs / len(scenes)),
        len(scenes),
        len(chosen),
        wanted is not None,
    )


def _changed(moved: Margins, margins: Margins) -> Margins:
    """How many of `margins` [N] change sign on each path, expected, of movements [E, seen]."""
    sizes = np.sqrt(np.mean(moved**2, axis=1, keepdims=True))
    shape = np.sort((moved / np.where(sizes > 0, sizes, 1.0)).ravel())
    # A margin above zero changes with a movement of at most its negative, else with one above it.
    below = np.searchsorted(shape, -margins / np.where(sizes > 0, sizes, np.inf), side="right")
    share = below / len(shape)
    changed: Margins = np.where(margins > 0, share, 1.0 - share).sum(1)
    return np.where(sizes[:, 0] > 0, changed, 0.0)


def _chosen(
    margins: Margins, sample: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Scenes for the paths to answer, and which of these were drawn at random."""
    order = np.argsort(np.abs(margins), kind="stable")
    near = order[: sample // 2]
    rest = order[len(near) :]
    drawn = np.random.default_rng(seed).permutation(rest)[: max(sample - len(near), 1)]
    chosen = np.concatenate([near, drawn])
    return chosen, np.arange(len(chosen)) >= len(near)
