"""Attribute disagreement between device paths to their stages.

A stage's effect is the mean of two differences: the instability when only it varies, and the
decrease when every path runs it as the reference does. If the two differ, stages interact.
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
    Report,
    Scenes,
    checked_labels,
    format_interval,
    lead_margins,
    scores,
)
from slipstream.tables import Field, Table
from slipstream.units import format_percent

_LEVEL = 0.95


@dataclass(frozen=True)
class Cause:
    """Effect of one stage on the agreement of the paths.

    Attributes:
        stage: its kind, or ``kind.setting``.
        alone: instability when only this stage varies; divergence without labels.
        without: instability of all paths when this stage runs as in the reference.
        effect: mean of `alone` and of the total minus `without`, with its interval over scenes.
        smoothed: the effect with margins smoothed, which ranks the stages.
        variants: number of distinct settings of this stage, including the reference's.
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
        labelled: whether values are instability; without labels they are divergence.
        items, paths: number of scenes, and of paths without the reference.
    """

    causes: tuple[Cause, ...]
    total: Interval
    labelled: bool
    items: int
    paths: int

    @property
    def interaction(self) -> float:
        """The total minus the sum of `alone`; below 0 if stages disturb the same scenes."""
        return self.total.estimate - sum(cause.alone for cause in self.causes)

    def tables(self) -> list[Table]:
        """Return a table with a row per stage."""
        measure = "instability" if self.labelled else "divergence"
        cells: tuple[Field[Cause], ...] = (
            Field.of("stage", lambda cause: cause.stage),
            Field.number("effect", lambda cause: format_percent(cause.effect.estimate)),
            Field.number("95 %", lambda cause: format_interval(cause.effect)),
            Field.number("smoothed", lambda cause: format_percent(cause.smoothed)),
            Field.number("alone", lambda cause: format_percent(cause.alone)),
            Field.number("all without", lambda cause: format_percent(cause.without)),
            Field.number("variants", lambda cause: str(cause.variants), optional=True),
        )
        notes = [
            f"All stages: {format_percent(self.total.estimate)} {measure} of {self.items} scenes "
            f"over the reference and {self.paths} paths; not attributed to a stage: "
            f"{format_percent(self.interaction, signed=True)}.",
            "effect: mean of the instability of a stage alone and of the decrease without it; "
            "smoothed: the same from margins, also if no answer changes; it sets the order.",
        ]
        return [Table.of(self.causes, cells, f"What causes {measure}", notes)]

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the tables."""
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
    report: Report = lambda line: None,
) -> Attribution:
    """Attribute instability to the stages in which paths differ from the reference.

    Args:
        models, scenes, labels: as for `measure`.
        matrix: at least one path.
        settings: whether to vary each setting (``camera.sharpen``) instead of whole stages.

    Raises:
        InvalidArgumentError: the paths do not differ from the reference; other errors as `measure`.
    """
    targets = checked_labels(labels, len(scenes))
    factors = _factors(matrix, settings)
    if not factors:
        raise InvalidArgumentError(
            "paths", "none of them differs from the reference",
            remedy="for example --path camera:edge,sharpen=0.8+codec:jpeg,quality=60",
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
    # Many sets share paths; each distinct path runs once.
    distinct = {(p.pipeline, p.model): p for paths in sets.values() for p in paths}
    margins = _margins(models, scenes, list(distinct.values()), targets, report)
    margins_of = dict(zip(distinct, margins, strict=True))

    def set_of(name: str) -> NDArray[np.float64]:
        return np.stack([margins_of[p.pipeline, p.model] for p in sets[name]])

    # Smoothing width: the spread of margins between scenes.
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
    causes.sort(key=lambda cause: -cause.smoothed)
    return Attribution(
        tuple(causes), metric.share(total), targets is not None, len(scenes), len(matrix)
    )


def _margins(
    models: Models, scenes: Scenes, paths: Sequence[DevicePath],
    labels: NDArray[np.int64] | None, report: Report,
) -> NDArray[np.float64]:  # fmt: skip
    """Return the margins [E, N] of the labels, or of the first path's classes, on each path."""
    parts, at = [], 0
    for scored in scores(models, scenes, paths, report=report):
        outputs = [output for _, output in scored]
        count = len(outputs[0])
        right = outputs[0].argmax(1) if labels is None else labels[at : at + count]
        parts.append(np.stack([lead_margins(output, right) for output in outputs]))
        at += count
    return np.concatenate(parts, 1)


def _separated(
    margins: NDArray[np.float64], width: float
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return whether 0 separates margins [E, N], and the chance that a limit N(0, width) does."""
    highest, lowest = margins.max(0), margins.min(0)
    return (highest > 0) & (lowest <= 0), ndtr(highest / width) - ndtr(lowest / width)


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
            f"{kind}.{setting.name}"
            for setting in fields(stage)
            if any(
                getattr(p.stages[kind], setting.name) != getattr(stage, setting.name)
                for p in matrix
            )
        ]
    return factors


def _exchanged(path: DevicePath, factor: str, other: DevicePath) -> DevicePath:
    """Return `path` with one stage or setting of `other`."""
    kind, _, setting = factor.partition(".")
    if not setting or kind == MODEL:
        return path.with_stage(kind, other)
    stage, replacement = path.stages[kind], other.stages[kind]
    assert isinstance(stage, Stage)
    changed = stage.changed(**{setting: getattr(replacement, setting)})
    return DevicePath(path.name, path.pipeline.with_stage(changed), path.model)
