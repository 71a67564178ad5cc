"""Search the change of the reference's preprocessing that explains the inputs of the app.

Inputs of the app are known only by their projections (see `statistics`) and need not have been
recorded: each candidate pipeline runs on the raw inputs, and its projections are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from slipstream.runtimes.preprocessing import (
    Cast,
    Channels,
    Layout,
    Memo,
    Orient,
    Pipeline,
    RawInputError,
    Variation,
)
from slipstream.ship.xray.statistics import Array, canonical, groups_of, measured, projections_of

# An explanation leaves at most this difference, and reduces it by at least this factor.
ACCEPTED, BETTER = 0.02, 10.0
# Smaller differences do not matter to a model: another decoder, another library's rounding.
HARMLESS = 0.02
# A small difference is explained only by a change that reproduces it to the last bit.
_EXACT = 0.002
FRAMES, ENOUGH = 8, 5
_SCREENED = 16
# Number of the best pairs that are extended by a third stage.
_EXTENDED = 24
_AFFINE = ("scale", "normalise", "cast")

Kind = Literal["equal", "harmless", "preprocessing", "unexplained", "unknown"]


@dataclass(frozen=True)
class Cause:
    """Explanation of the difference between inputs and those of the reference pipeline.

    Attributes:
        kind: ``equal``; ``harmless``: too small to matter; ``preprocessing``: explained;
            ``unexplained``; ``unknown``: the logs hold too little.
        text: description.
        before: distance of the inputs to the reference's, RMSE over their standard deviation.
        after: the same once the explanation is applied.
        stages: kinds of the stages that differ.
        fix: lines of Python that correct them.
        pipeline: the app's preprocessing; None if nothing explains it.
        alternatives: other explanations that fit these frames equally well.
        frames: number of raw inputs used.
    """

    kind: Kind
    text: str
    before: float = 0.0
    after: float = 0.0
    stages: tuple[str, ...] = ()
    fix: str = ""
    pipeline: Pipeline | None = None
    alternatives: tuple[str, ...] = ()
    frames: int = 0


class _Observed:
    """Inputs of the app by frame, and their distance to those of a pipeline."""

    def __init__(self, statistics: Array, raws: Sequence[Any], max_bytes: int = 256 << 20) -> None:
        self.statistics = statistics
        self.memo = Memo(raws, max_bytes)
        elements, std = statistics["elements"].astype(np.float64), statistics["std"]
        self.energy = elements * std.astype(np.float64) ** 2

    def projections(self, pipeline: Pipeline, frame: int) -> Array | None:
        """Return the projections of a pipeline's input; None if its size differs."""
        value = np.asarray(self.memo(pipeline, frame))
        if value.size != self.statistics["elements"][frame]:
            return None
        return np.asarray(measured([canonical(value[None])])["projections"][0], np.float64)

    def residual(self, pipeline: Pipeline, frames: Sequence[int]) -> float:
        """Return RMSE over deviation of all `frames` together; infinite if sizes differ."""
        return self.distance([self.projections(pipeline, frame) for frame in frames], frames)

    def distance(self, made: Sequence[Array | None], frames: Sequence[int]) -> float:
        """Return the residual of given projections."""
        distance = energy = 0.0
        for projections, frame in zip(made, frames, strict=True):
            if projections is None:
                return np.inf
            distance += float(np.square(projections - self.statistics["projections"][frame]).sum())
            energy += self.energy[frame]
        return float(np.sqrt(distance / max(energy, 1e-12)))


def explain(
    statistics: Array,
    raws: Sequence[Any],
    pipeline: Pipeline,
    *,
    depth: int = 3,
    report: Callable[[str], None] = lambda line: None,
) -> Cause:
    """Find the simplest change of `pipeline` that reproduces the app's inputs.

    Args:
        statistics: `STATISTICS` [frames] of the model input of each frame.
        raws: the raw input of each frame, as the pipeline's first stage reads it.
        pipeline: correct preprocessing.
        depth: number of stages that may differ simultaneously: 1, 2 or 3. Triples extend the best
            pairs, so that not every combination is tried.
        report: called with progress messages.
    """
    usable: list[int] = []
    damaged = ""
    for frame in range(len(raws)):
        if len(usable) == FRAMES:
            break
        if statistics["std"][frame] == 0 and (statistics["std"] > 0).any():
            continue  # a constant input explains nothing, unless all are constant
        try:
            pipeline(raws[frame])
        except RawInputError as error:
            damaged = f"raw input {frame}: {error.what}"
            continue
        usable.append(frame)
    if not usable:
        return Cause("unknown", damaged or "no frame has both a model input and a raw input")
    observed = _Observed(statistics[usable], [raws[n] for n in usable])
    frames = range(len(usable))
    complete = pipeline.completed()
    before = observed.residual(complete, frames)
    facts: dict[str, Any] = {"before": before, "frames": len(usable)}
    if before < 1e-6:
        return Cause("equal", "the inputs equal the reference's", **facts)
    harmless, exact = (0.0, 1e-6) if _is_tokens(complete) else (HARMLESS, _EXACT)
    report("searching for the difference: single stages")
    singles = _scored(observed, complete, list(complete.variations()), frames)
    limit = min(ACCEPTED if before > harmless else exact, before / BETTER)
    best = singles[:1]
    if (not best or best[0][0] > exact) and depth > 1 and before > harmless:
        report("searching for the difference: pairs of stages")
        changes = [change for _, change in singles]
        pairs = _pairs(observed, complete, changes, frames)
        if depth > 2 and pairs and pairs[0][0] > limit:
            report("searching for the difference: three stages")
            triples = _triples(observed, complete, [pair for _, pair in pairs], changes, frames)
            # A third change must reduce the residual further by the same factor.
            if triples and triples[0][0] <= min(limit, pairs[0][0] / BETTER):
                pairs = triples
        better = not best or best[0][0] > limit or (pairs[:1] and pairs[0][0] < best[0][0] / BETTER)
        if better and pairs and pairs[0][0] <= limit:
            singles, best = pairs, pairs[:1]
    if best and best[0][0] <= limit:
        return _named(singles, facts)
    if before <= harmless:
        return Cause(
            "harmless", f"inputs differ by {before:.1%} of their standard deviation, as with "
            "another decoder, library or precision", after=before, **facts,
        )  # fmt: skip
    return _affine(observed, complete, singles, frames, facts)


def _is_tokens(pipeline: Pipeline) -> bool:
    """Return whether inputs are token ids, for which small differences matter."""
    last = pipeline.stages[-1] if pipeline.stages else None
    if not isinstance(last, Cast) or last.scale:
        return False
    dtype = np.dtype(last.dtype)
    return dtype.kind in "iu" and dtype.itemsize >= 4


def explain_arrays(statistics: Array, references: Sequence[Array], **options: Any) -> Cause:
    """Run `explain` on the reference's own inputs [1, ...] of each frame instead of raw inputs."""
    samples = [np.asarray(batch[0], np.float32) for batch in references]
    if samples[0].ndim != 3:
        return explain(statistics, samples, Pipeline(()), **options)
    first = samples[0].shape[0] <= 4
    images = [sample.transpose(1, 2, 0) if first else sample for sample in samples]
    stages = (Orient(), Channels(), Layout("CHW" if first else "HWC"))
    if images[0].shape[2] != 3:
        stages = (Orient(), Layout("CHW" if first else "HWC"))  # type: ignore[assignment]
    return explain(statistics, images, Pipeline(stages), **options)


def _scored(
    observed: _Observed, complete: Pipeline, variations: Sequence[Variation], frames: Sequence[int]
) -> list[tuple[float, Variation]]:
    """Return changes with their residuals, the best first, without those of no effect."""
    same = [observed.projections(complete, frame) for frame in frames]
    ranked = []
    for variation in variations:
        projected = [observed.projections(variation.pipeline, frame) for frame in frames]
        if all(
            a is not None and b is not None and np.allclose(a, b, rtol=1e-9)
            for a, b in zip(projected, same, strict=True)
        ):
            continue
        ranked.append((observed.distance(projected, frames), variation))
    return sorted(ranked, key=lambda scored: scored[0])


def _pairs(
    observed: _Observed, complete: Pipeline, singles: Sequence[Variation], frames: Sequence[int]
) -> list[tuple[float, Variation]]:
    # Screen on one frame, ordered so that the memo holds the common stages.
    order = sorted(singles, key=lambda single: single.changes[0][0])
    screened = [
        (observed.residual(pair.pipeline, frames[:1]), pair) for pair in complete.pairs(order)
    ]
    return _rescored(observed, screened, _EXTENDED, frames)


def _triples(
    observed: _Observed, whole: Pipeline, pairs: Sequence[Variation], singles: Sequence[Variation],
    frames: Sequence[int],
) -> list[tuple[float, Variation]]:  # fmt: skip
    """Extend pairs by every change of a third stage; return the best first."""
    screened = []
    seen = set()
    for pair in pairs:
        changed = {place for place, *_ in pair.changes}
        for single in singles:
            ((place, right, wrong),) = single.changes
            changes = tuple(
                sorted([*pair.changes, (place, right, wrong)], key=lambda change: change[0])
            )
            if place in changed or changes in seen:
                continue
            seen.add(changes)
            stages = list(pair.pipeline.stages)
            stages[place] = wrong
            triple = Variation(f"{pair.text}; {single.text}", Pipeline(tuple(stages)), changes)
            screened.append((observed.residual(triple.pipeline, frames[:1]), triple))
    return _rescored(observed, screened, _SCREENED, frames)


def _rescored(
    observed: _Observed, screened: list[tuple[float, Variation]], count: int, frames: Sequence[int]
) -> list[tuple[float, Variation]]:
    """Return the best of those screened on one frame, ranked on all frames."""
    screened.sort(key=lambda scored: scored[0])
    best = [(observed.residual(v.pipeline, frames), v) for _, v in screened[:count]]
    return sorted(best, key=lambda scored: scored[0])


def _named(scored: Sequence[tuple[float, Variation]], facts: dict[str, Any]) -> Cause:
    after, best = scored[0]
    equal = tuple(other.text for residual, other in scored[1:6] if residual <= after + 1e-6)
    return Cause(
        "preprocessing", best.text, after=after, stages=best.stages, fix=_fix(best),
        pipeline=best.pipeline, alternatives=equal, **facts,
    )  # fmt: skip


def _fix(variation: Variation) -> str:
    lines = []
    for _, right, wrong in variation.changes:
        if wrong.code() == right.code():
            # The wrong stage has no separate line, such as a stage that is applied twice.
            lines.append(f"# fixes: {variation.text}")
        else:
            lines += [f"# instead of: {line}" for line in wrong.code().splitlines()]
        lines += right.code().splitlines()
    return "\n".join(lines)


def _affine(
    observed: _Observed, complete: Pipeline, singles: Sequence[tuple[float, Variation]],
    frames: Sequence[int], facts: dict[str, Any],
) -> Cause:  # fmt: skip
    """Fit a slope and offset per channel, after at most one other change."""
    others = [single for _, single in singles if single.stages[0] not in _AFFINE]
    best: tuple[float, Variation, Array] | None = None
    for variation in (Variation("", complete, ()), *others):
        fitted = _fit(observed, variation.pipeline, frames)
        # An extra change must reduce an accepted residual by the same factor.
        if fitted and (best is None or fitted[0] < best[0] / (BETTER if best[0] < ACCEPTED else 1)):
            best = fitted[0], variation, fitted[1]
    if best is None or best[0] > min(ACCEPTED, facts["before"] / BETTER):
        return Cause(
            "unexplained", f"inputs differ by {facts['before']:.0%} of their standard deviation, "
            "which no change of a few stages explains", after=best[0] if best else np.inf, **facts,
        )  # fmt: skip
    after, variation, terms = best
    slopes, offsets = (", ".join(f"{value:.4g}" for value in row) for row in terms)
    text = f"values are the reference's times ({slopes}) plus ({offsets})"
    fix = f"x = (x - [{offsets}]) / [{slopes}]  # per channel"
    if variation.changes:
        text, fix = f"{variation.text}; {text}", f"{_fix(variation)}\n{fix}"
    stages = (*variation.stages, "normalise")
    return Cause("preprocessing", text, after=after, stages=stages, fix=fix, **facts)


def _fit(
    observed: _Observed, pipeline: Pipeline, frames: Sequence[int]
) -> tuple[float, Array] | None:
    """Return the residual of the best slopes and offsets per channel, and both, [2, channels]."""
    rows, targets = [], []
    energy = 0.0
    for frame in frames:
        value = np.asarray(observed.memo(pipeline, frame), np.float32)
        if value.size != observed.statistics["elements"][frame]:
            return None
        ordered = canonical(value[None])
        channels = len(ordered) if ordered.ndim > 1 and len(ordered) <= 4 else 1
        parts = ordered.reshape(channels, -1)
        if groups_of(len(ordered) if ordered.ndim > 1 else 1) % channels:
            channels, parts = 1, ordered.reshape(1, -1)
        columns = []
        for filled in (parts, np.ones_like(parts)):
            for channel in range(channels):
                alone = np.zeros_like(parts)
                alone[channel] = filled[channel]
                columns.append(projections_of(alone.reshape(ordered.shape)))
        rows.append(np.stack(columns, 1))
        targets.append(observed.statistics["projections"][frame].astype(np.float64))
        energy += observed.energy[frame]
    matrix, target = np.concatenate(rows), np.concatenate(targets)
    if len(target) < 4 * matrix.shape[1]:
        return None
    # Scale the columns: the solver would drop those that are much smaller than others.
    size = np.linalg.norm(matrix, axis=0) + 1e-12
    terms, *_ = np.linalg.lstsq(matrix / size, target, rcond=None)
    residual = float(np.sqrt(np.square(matrix / size @ terms - target).sum() / max(energy, 1e-12)))
    slopes, offsets = (terms / size).reshape(2, -1)
    if not np.all(np.abs(slopes) > 1e-6):
        return None  # a slope of 0 would fit any input
    return residual, np.stack([slopes, offsets])


def confident(cause: Cause) -> Cause:
    """Return the cause, with a caveat if it rests on few frames."""
    if cause.kind == "preprocessing" and cause.frames < ENOUGH:
        few = f"based on only {cause.frames} frames; {ENOUGH} are needed to be sure"
        return replace(cause, text=f"{cause.text} ({few})")
    return cause
