"""Which change of the reference's preprocessing gives what the app fed: found by search, not asked.

What the app fed is known by its projections alone (see `statistics`), so that it need not have been
recorded itself: a candidate is run on the raw inputs, and its projections are held against those.
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

# An explanation leaves at most this share of what differs, and is so many times better than none.
ACCEPTED, BETTER = 0.02, 10.0
# Below this the inputs are the same for a model: another decoder, another library's rounding.
HARMLESS = 0.02
# Of a difference that small, only what explains it to the last bit is named.
_EXACT = 0.002
FRAMES, ENOUGH = 8, 5
_SCREENED = 16
# Three stages: pairs that are extended by every third one.
_EXTENDED = 24
_AFFINE = ("scale", "normalise", "cast")

Kind = Literal["equal", "harmless", "preprocessing", "unexplained", "unknown"]


@dataclass(frozen=True)
class Cause:
    """Why inputs differ from what the reference pipeline makes.

    Attributes:
        kind: ``equal``; ``harmless``: a difference no model notices; ``preprocessing``: explained;
            ``unexplained``; ``unknown``: too little was recorded to say.
        text: in words.
        before: how far the inputs are from the reference's, RMSE over their deviation.
        after: the same once the explanation is applied.
        stages: kinds of the stages that are done otherwise.
        fix: lines of Python that put it right.
        pipeline: that does what the app does; None if nothing explains it.
        alternatives: other explanations that these frames cannot tell apart.
        frames: raw inputs that it rests on.
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
    """What the app fed, frame by frame, and how far a pipeline is from it."""

    def __init__(self, statistics: Array, raws: Sequence[Any], most_bytes: int = 256 << 20) -> None:
        self.statistics = statistics
        self.memo = Memo(raws, most_bytes)
        elements, std = statistics["elements"].astype(np.float64), statistics["std"]
        self.energy = elements * std.astype(np.float64) ** 2

    def projections(self, pipeline: Pipeline, frame: int) -> Array | None:
        """None if it comes out in another size."""
        value = np.asarray(self.memo(pipeline, frame))
        if value.size != self.statistics["elements"][frame]:
            return None
        return np.asarray(measured([canonical(value[None])])["projections"][0], np.float64)

    def residual(self, pipeline: Pipeline, frames: Sequence[int]) -> float:
        """RMSE over deviation, all `frames` together; infinite where sizes differ."""
        return self.distance([self.projections(pipeline, frame) for frame in frames], frames)

    def distance(self, made: Sequence[Array | None], frames: Sequence[int]) -> float:
        """The same of projections that a pipeline's inputs have."""
        distance = energy = 0.0
        for one, frame in zip(made, frames, strict=True):
            if one is None:
                return np.inf
            distance += float(np.square(one - self.statistics["projections"][frame]).sum())
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
    """The simplest change of `pipeline` that gives what was fed.

    Args:
        statistics: of the model input of each frame, `STATISTICS` [frames].
        raws: the raw input of each frame, as the pipeline's first stage reads it.
        pipeline: how inputs should be made.
        depth: stages that may differ simultaneously: 1, 2 or 3. Of three, the two that alone come
            nearest are found first, so that not every combination is tried.
        report: told what is searched.
    """
    usable: list[int] = []
    damaged = ""
    for frame in range(len(raws)):
        if len(usable) == FRAMES:
            break
        if statistics["std"][frame] == 0 and (statistics["std"] > 0).any():
            continue  # a constant says nothing, unless all are: then that is what is wrong
        try:
            pipeline(raws[frame])
        except RawInputError as error:
            damaged = f"raw input {frame}: {error.what}"
            continue
        usable.append(frame)
    if not usable:
        return Cause("unknown", damaged or "no frame has both a model input and its raw input")
    observed = _Observed(statistics[usable], [raws[n] for n in usable])
    frames = range(len(usable))
    whole = pipeline.completed()
    before = observed.residual(whole, frames)
    known: dict[str, Any] = {"before": before, "frames": len(usable)}
    if before < 1e-6:
        return Cause("equal", "the inputs are those of the reference", **known)
    harmless, exact = (0.0, 1e-6) if _numbers_words(whole) else (HARMLESS, _EXACT)
    report("searching what is done otherwise: single stages")
    singles = _scored(observed, whole, list(whole.variations()), frames)
    limit = min(ACCEPTED if before > harmless else exact, before / BETTER)
    best = singles[:1]
    if (not best or best[0][0] > exact) and depth > 1 and before > harmless:
        report("searching what is done otherwise: two stages at once")
        ones = [one for _, one in singles]
        pairs = _pairs(observed, whole, ones, frames)
        if depth > 2 and pairs and pairs[0][0] > limit:
            report("searching what is done otherwise: three stages simultaneously")
            triples = _triples(observed, whole, [pair for _, pair in pairs], ones, frames)
            # A third change has to be worth its mention.
            if triples and triples[0][0] <= min(limit, pairs[0][0] / BETTER):
                pairs = triples
        better = not best or best[0][0] > limit or (pairs[:1] and pairs[0][0] < best[0][0] / BETTER)
        if better and pairs and pairs[0][0] <= limit:
            singles, best = pairs, pairs[:1]
    if best and best[0][0] <= limit:
        return _named(singles, known)
    if before <= harmless:
        return Cause(
            "harmless", f"inputs differ by {before:.1%} of their deviation, as of another decoder, "
            "library or precision", after=before, **known,
        )  # fmt: skip
    return _affine(observed, whole, singles, frames, known)


def _numbers_words(pipeline: Pipeline) -> bool:
    """Whether inputs number words, of which the next is another word and not one nearby."""
    last = pipeline.stages[-1] if pipeline.stages else None
    if not isinstance(last, Cast) or last.scale:
        return False
    dtype = np.dtype(last.dtype)
    return dtype.kind in "iu" and dtype.itemsize >= 4


def explain_arrays(statistics: Array, references: Sequence[Array], **options: Any) -> Cause:
    """`explain` where raw inputs are missing, from the reference's own inputs.

    Args:
        statistics: of the model input of each frame, `STATISTICS` [frames].
        references: the reference's model input of each frame, [1, ...].
    """
    samples = [np.asarray(one[0], np.float32) for one in references]
    if samples[0].ndim != 3:
        return explain(statistics, samples, Pipeline(()), **options)
    first = samples[0].shape[0] <= 4
    images = [one.transpose(1, 2, 0) if first else one for one in samples]
    stages = (Orient(), Channels(), Layout("CHW" if first else "HWC"))
    if images[0].shape[2] != 3:
        stages = (Orient(), Layout("CHW" if first else "HWC"))  # type: ignore[assignment]
    return explain(statistics, images, Pipeline(stages), **options)


def _scored(
    observed: _Observed, whole: Pipeline, variations: Sequence[Variation], frames: Sequence[int]
) -> list[tuple[float, Variation]]:
    """With what each leaves, best first; those that change nothing in these frames left out."""
    same = [observed.projections(whole, frame) for frame in frames]
    ranked = []
    for one in variations:
        projected = [observed.projections(one.pipeline, frame) for frame in frames]
        if all(
            a is not None and b is not None and np.allclose(a, b, rtol=1e-9)
            for a, b in zip(projected, same, strict=True)
        ):
            continue
        ranked.append((observed.distance(projected, frames), one))
    return sorted(ranked, key=lambda scored: scored[0])


def _pairs(
    observed: _Observed, whole: Pipeline, singles: Sequence[Variation], frames: Sequence[int]
) -> list[tuple[float, Variation]]:
    # Screened on one frame, in an order in which a memo has what comes first.
    order = sorted(singles, key=lambda one: one.changes[0][0])
    screened = [(observed.residual(pair.pipeline, frames[:1]), pair) for pair in whole.pairs(order)]
    return _rescored(observed, screened, _EXTENDED, frames)


def _triples(
    observed: _Observed, whole: Pipeline, pairs: Sequence[Variation], singles: Sequence[Variation],
    frames: Sequence[int],
) -> list[tuple[float, Variation]]:  # fmt: skip
    """Extend pairs by every change of a third stage; what each leaves, best first."""
    screened = []
    seen = set()
    for pair in pairs:
        taken = {place for place, *_ in pair.changes}
        for single in singles:
            ((place, right, wrong),) = single.changes
            changes = tuple(sorted([*pair.changes, (place, right, wrong)], key=lambda one: one[0]))
            if place in taken or changes in seen:
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
    """The best of what was screened on one frame, by all frames."""
    screened.sort(key=lambda scored: scored[0])
    best = [(observed.residual(one.pipeline, frames), one) for _, one in screened[:count]]
    return sorted(best, key=lambda scored: scored[0])


def _named(scored: Sequence[tuple[float, Variation]], known: dict[str, Any]) -> Cause:
    after, best = scored[0]
    alike = tuple(one.text for residual, one in scored[1:6] if residual <= after + 1e-6)
    return Cause(
        "preprocessing", best.text, after=after, stages=best.stages, fix=_fix(best),
        pipeline=best.pipeline, alternatives=alike, **known,
    )  # fmt: skip


def _fix(variation: Variation) -> str:
    lines = []
    for _, right, wrong in variation.changes:
        if wrong.code() == right.code():
            # What is wrong has no line of its own, such as a stage that is applied twice.
            lines.append(f"# instead of what is wrong: {variation.text}")
        else:
            lines += [f"# instead of: {line}" for line in wrong.code().splitlines()]
        lines += right.code().splitlines()
    return "\n".join(lines)


def _affine(
    observed: _Observed, whole: Pipeline, singles: Sequence[tuple[float, Variation]],
    frames: Sequence[int], known: dict[str, Any],
) -> Cause:  # fmt: skip
    """Any slope and offset per channel, after one other change at most."""
    others = [one for _, one in singles if one.stages[0] not in _AFFINE]
    best: tuple[float, Variation, Array] | None = None
    for one in (Variation("", whole, ()), *others):
        fitted = _fit(observed, one.pipeline, frames)
        # One more change has to be worth its mention.
        if fitted and (best is None or fitted[0] < best[0] / (BETTER if best[0] < ACCEPTED else 1)):
            best = fitted[0], one, fitted[1]
    if best is None or best[0] > min(ACCEPTED, known["before"] / BETTER):
        return Cause(
            "unexplained", f"inputs differ by {known['before']:.0%} of their deviation, and no "
            "change of a few stages explains it", after=best[0] if best else np.inf, **known,
        )  # fmt: skip
    after, one, terms = best
    slopes, offsets = (", ".join(f"{value:.4g}" for value in row) for row in terms)
    text = f"values are those of the reference times ({slopes}) plus ({offsets})"
    fix = f"x = (x - [{offsets}]) / [{slopes}]  # per channel"
    if one.changes:
        text, fix = f"{one.text}; {text}", f"{_fix(one)}\n{fix}"
    return Cause("preprocessing", text, after=after, stages=(*one.stages, "normalise"), fix=fix,
                 pipeline=None, **known)  # fmt: skip


def _fit(
    observed: _Observed, pipeline: Pipeline, frames: Sequence[int]
) -> tuple[float, Array] | None:
    """What the best slope and offset per channel leave, and both, [2, channels]."""
    rows, wanted = [], []
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
        wanted.append(observed.statistics["projections"][frame].astype(np.float64))
        energy += observed.energy[frame]
    matrix, target = np.concatenate(rows), np.concatenate(wanted)
    if len(target) < 4 * matrix.shape[1]:
        return None
    # Columns of very different size would hide each other from the solver.
    size = np.linalg.norm(matrix, axis=0) + 1e-12
    terms, *_ = np.linalg.lstsq(matrix / size, target, rcond=None)
    left = float(np.sqrt(np.square(matrix / size @ terms - target).sum() / max(energy, 1e-12)))
    slopes, offsets = (terms / size).reshape(2, -1)
    if not np.all(np.abs(slopes) > 1e-6):
        return None  # it would explain any input by leaving out the reference's
    return left, np.stack([slopes, offsets])


def confident(cause: Cause) -> Cause:
    """The cause, with a word of doubt where it rests on few frames."""
    if cause.kind == "preprocessing" and cause.frames < ENOUGH:
        few = f"only {cause.frames} frames speak for it, of {ENOUGH} that it takes to be sure"
        return replace(cause, text=f"{cause.text} ({few})")
    return cause
