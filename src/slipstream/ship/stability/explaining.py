"""Which stage of the device paths makes answers differ: one at a time, and all but one.

A stage's effect is the mean of two differences: what it does alone, to the reference, and what is
gone when every path does it as the reference does. With several stages at work the first counts too
little and the second too much, or the other way round; where they differ, stages interact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from slipstream.errors import InvalidArgumentError
from slipstream.measure import instability as metric
from slipstream.measure.statistics import Interval, critical_value
from slipstream.runtimes.paths import MODEL, DeviceMatrix, DevicePath
from slipstream.runtimes.preprocessing import Stage
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

_LEVEL = 0.95


@dataclass(frozen=True)
class Cause:
    """What one stage does to the agreement of the paths.

    Attributes:
        stage: its kind, or ``kind.setting``.
        alone: instability of the reference and its variants in this stage, all else as it should
            be; divergence where there are no labels.
        without: of all paths, this stage done as the reference does it.
        effect: mean of `alone` and of what `without` lacks to the total, with its interval over
            scenes.
        smoothed: the effect that decides the order: see above.
        variants: in how many ways the paths do it, the reference's among them.
    """

    stage: str
    alone: float
    without: float
    effect: Interval
    smoothed: float
    variants: int


@dataclass(frozen=True)
class Attribution:
    """Causes of instability, the largest first.

    Attributes:
        total: of the reference and all paths.
        labelled: whether it is instability, or divergence for lack of labels.
        items, paths: how many scenes, and paths beside the reference.
    """

    causes: tuple[Cause, ...]
    total: Interval
    labelled: bool
    items: int
    paths: int

    @property
    def interaction(self) -> float:
        """The total less what all stages do alone; below 0 where they disturb the same scenes."""
        return self.total.estimate - sum(one.alone for one in self.causes)

    def tables(self) -> list[Table]:
        """A line a stage."""
        what = "instability" if self.labelled else "divergence"
        cells: tuple[Field[Cause], ...] = (
            Field.of("stage", lambda one: one.stage),
            Field.number("effect", lambda one: format_percent(one.effect.estimate)),
            Field.number(
                "95 %",
                lambda c: f"{format_percent(c.effect.low)} to {format_percent(c.effect.high)}",
            ),
            Field.number("smoothed", lambda one: format_percent(one.smoothed)),
            Field.number("alone", lambda one: format_percent(one.alone)),
            Field.number("all without", lambda one: format_percent(one.without)),
            Field.number("variants", lambda one: str(one.variants), optional=True),
        )
        notes = [
            f"All stages: {format_percent(self.total.estimate)} {what} of {self.items} scenes over "
            f"the reference and {self.paths} paths; not shared out: "
            f"{format_percent(self.interaction, signed=True)}.",
            "effect: mean of what a stage does alone and of what is gone without it; smoothed: by "
            "how far margins move, also where no answer changes. It decides the order.",
        ]
        return [Table.of(self.causes, cells, f"What causes {what}", notes)]

    def to_json(self) -> dict[str, Any]:
        """Everything the tables are made of."""
        return {
            "measure": "instability" if self.labelled else "divergence",
            "total": self.total,
            "interaction": self.interaction,
            "items": self.items,
            "paths": self.paths,
            "causes": self.causes,
        }


def explain(
    models: Models,
    scenes: Scenes,
    matrix: DeviceMatrix,
    labels: Sequence[int] | NDArray[np.int64] | None = None,
    *,
    settings: bool = False,
    say: Say = lambda line: None,
) -> Attribution:
    """Share out instability among the stages by which paths differ from the reference.

    Args:
        models, scenes, labels: as `measure` takes them.
        matrix: one path at least.
        settings: look at every setting of a stage (``camera.sharpen``) rather than at whole stages.

    Raises:
        InvalidArgumentError: the paths do nothing otherwise than the reference.
        and as `measure`.
    """
    wanted = checked_labels(labels, len(scenes))
    factors = _factors(matrix, settings)
    if not factors:
        raise InvalidArgumentError(
            "paths", "they do nothing otherwise than the reference",
            remedy="as --path camera:edge,sharpen=0.8+codec:jpeg,quality=60",
        )  # fmt: skip
    reference = matrix.reference
    sets: dict[str, list[DevicePath]] = {"": [reference, *matrix.paths]}
    for factor in factors:
        sets[f"{factor} alone"] = [
            reference, *(_exchanged(reference, factor, path) for path in matrix.paths)
        ]  # fmt: skip
        sets[f"{factor} without"] = [
            reference, *(_exchanged(path, factor, reference) for path in matrix.paths)
        ]  # fmt: skip
    # Many are the same way in the end; each is gone once.
    ways = {(p.pipeline, p.model): p for paths in sets.values() for p in paths}
    margins = _margins(models, scenes, list(ways.values()), wanted, say)
    at = dict(zip(ways, margins, strict=True))

    def set_of(name: str) -> NDArray[np.float64]:
        return np.stack([at[p.pipeline, p.model] for p in sets[name]])

    # As wide as margins differ from scene to scene.
    width = float(set_of("")[0].std()) or 1.0
    total, total_smoothed = _separated(set_of(""), width)
    causes = []
    for factor in factors:
        alone, alone_smoothed = _separated(set_of(f"{factor} alone"), width)
        without, without_smoothed = _separated(set_of(f"{factor} without"), width)
        each = np.stack([alone, total, ~without]).sum(0) / 2 - 0.5
        smoothed = float((alone_smoothed + total_smoothed - without_smoothed).mean()) / 2
        variants = {(p.pipeline, p.model) for p in sets[f"{factor} alone"]}
        causes.append(Cause(
            factor, float(alone.mean()), float(without.mean()), _mean(each), smoothed, len(variants)
        ))  # fmt: skip
    causes.sort(key=lambda one: -one.smoothed)
    return Attribution(
        tuple(causes), metric.share(total), wanted is not None, len(scenes), len(matrix)
    )


def _margins(
    models: Models, scenes: Scenes, paths: Sequence[DevicePath],
    labels: NDArray[np.int64] | None, say: Say,
) -> NDArray[np.float64]:  # fmt: skip
    """By how much the right class leads on each path [E, N]; without labels the first path's."""
    parts, at = [], 0
    for scored in scores(models, scenes, paths, say=say):
        given = [one for _, one in scored]
        count = len(given[0])
        right = given[0].argmax(1) if labels is None else labels[at : at + count]
        parts.append(np.stack([leads(one, right) for one in given]))
        at += count
    return np.concatenate(parts, 1)


def _separated(
    margins: NDArray[np.float64], width: float
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Whether 0 lies between margins [E, N] of a scene, and how likely a limit around it does.

    Args:
        width: standard deviation of the limit.
    """
    most, least = margins.max(0), margins.min(0)
    return (most > 0) & (least <= 0), ndtr(most / width) - ndtr(least / width)


def _mean(values: NDArray[np.float64]) -> Interval:
    mean = float(values.mean())
    half = critical_value(_LEVEL) * float(values.std(ddof=min(1, len(values) - 1)))
    half /= max(len(values), 1) ** 0.5
    return Interval(mean, mean - half, mean + half, _LEVEL, "normal")


def _factors(matrix: DeviceMatrix, settings: bool) -> list[str]:
    if not settings:
        return list(matrix.varied)
    factors = []
    for kind in matrix.varied:
        stage = matrix.reference.stages[kind]
        if not isinstance(stage, Stage):
            factors.append(kind)
            continue
        factors += [
            f"{kind}.{name.name}"
            for name in fields(stage)
            if any(getattr(p.stages[kind], name.name) != getattr(stage, name.name) for p in matrix)
        ]
    return factors


def _exchanged(path: DevicePath, factor: str, other: DevicePath) -> DevicePath:
    """`path`, one stage or setting done as `other` does it."""
    kind, _, setting = factor.partition(".")
    if not setting or kind == MODEL:
        return path.with_stage(kind, other)
    stage, its = path.stages[kind], other.stages[kind]
    assert isinstance(stage, Stage)
    changed = stage.changed(**{setting: getattr(its, setting)})
    return DevicePath(path.name, path.pipeline.with_stage(changed), path.model)
