"""Measure instability: every path classifies every scene."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.measure import instability as metric
from slipstream.measure.statistics import Interval
from slipstream.runtimes import ModelError, Runtime, fit
from slipstream.runtimes.paths import DevicePath
from slipstream.runtimes.preprocessing import Memo, RawInputError
from slipstream.tables import Column, Field, Table
from slipstream.units import format_percent

Models = Runtime | Mapping[str, Runtime]
Scenes = Sequence[Any] | NDArray[np.uint8]
Report = Callable[[str], None]
# Number of scenes whose samples are in memory simultaneously, for every path.
_CHUNK = 16


@dataclass(frozen=True)
class Stability:
    """Answers of every path for every scene.

    Attributes:
        names: names of the E paths.
        classes: int64 [E, N, K], the K classes with the highest scores, the highest first.
        labels: int64 [N]; None if only divergence is measured.
        same: groups of paths with identical samples: each group is one device.
    """

    names: tuple[str, ...]
    classes: NDArray[np.int64]
    labels: NDArray[np.int64] | None = None
    same: tuple[tuple[str, ...], ...] = ()

    def right(self, k: int = 1) -> NDArray[np.bool_]:
        """Return whether the label is among the first `k` answers, bool [E, N].

        Raises:
            InvalidArgumentError: there are no labels, or fewer answers.
        """
        if self.labels is None:
            raise InvalidArgumentError(
                "labels", "the scenes have none, so only divergence is measured"
            )
        if not 1 <= k <= self.classes.shape[2]:
            raise InvalidArgumentError(
                "topk", f"{k} is not between 1 and {self.classes.shape[2]}, the answers stored"
            )
        return metric.right_of(self.classes[:, :, :k], self.labels)

    @property
    def answers(self) -> NDArray[np.int64]:
        """The top class, int64 [E, N]."""
        return self.classes[:, :, 0]

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """Accuracy of each path, [E]."""
        return np.asarray(self.right().mean(1))

    def instability(self, k: int = 1) -> Interval:
        """Return the share of scenes with both right and wrong paths, and its Wilson interval."""
        return metric.share(metric.unstable(self.right(k)))

    @property
    def divergence(self) -> Interval:
        """Share of scenes whose answers are not all the same; needs no labels."""
        return metric.share(metric.diverging(self.answers))

    def matrix(self, k: int = 1) -> NDArray[np.float64]:
        """Return the instability of every pair of paths, [E, E]; divergence without labels."""
        return metric.pairwise(self.answers if self.labels is None else self.right(k))

    def growth(self) -> NDArray[np.float64]:
        """Return the mean instability of 2, 3, ... E of the paths, [E - 1]."""
        return metric.growth(self.right())

    def worst_items(self, count: int = 20) -> list[int]:
        """Return the scenes on which most paths disagree, the most disputed first."""
        if self.labels is not None:
            votes = self.right().sum(0)
        else:
            votes = (self.answers == self.answers[:1]).sum(0)
        disputed = np.minimum(votes, len(self.names) - votes)
        order = np.argsort(-disputed, kind="stable")
        return [int(scene) for scene in order[:count] if disputed[scene]]

    def tables(self) -> list[Table]:
        """Return a summary and a table with a row per path."""
        headline = [("divergence (no labels needed)", self.divergence)]
        if self.labels is not None:
            ks = [k for k in (1, 3, 5) if k <= self.classes.shape[2]]
            headline = [(f"instability, top {k}", self.instability(k)) for k in ks] + headline
        pairs = self.matrix()[np.triu_indices(len(self.names), 1)]
        grown = "" if self.labels is None else "; ".join(
            f"{n}: {format_percent(float(self.growth()[n - 2]))}"
            for n in sorted({2, 4, 8, len(self.names)}) if n <= len(self.names)
        )  # fmt: skip
        kind = "divergence" if self.labels is None else "instability"
        summary = Table(
            (Column("measure"), Column("share", "right"), Column("95 %", "right")),
            [(name, format_percent(e.estimate), format_interval(e)) for name, e in headline],
            f"{self.classes.shape[1]} scenes over {len(self.names)} device paths",
            [
                f"Mean {kind} of two paths: {format_percent(float(pairs.mean()))}.",
                *([f"It grows with the number of paths ({grown})."] if grown else []),
                *(f"These paths count as one device: {', '.join(group)} give the same bytes."
                  for group in self.same),
            ],
        )  # fmt: skip
        fields: list[Field[int]] = [Field.of("path", lambda e: self.names[e])]
        notes = []
        if self.labels is not None:
            accuracy = self.accuracy
            fields.append(Field.number("accuracy", lambda e: format_percent(float(accuracy[e]))))
            spread = float(np.ptp(accuracy))
            mean, largest = metric.spread_by_chance(self.right())
            shares = [format_percent(share) for share in (spread, mean, largest)]
            verdict = (
                "no path is significantly worse" if spread <= largest else "some path is worse"
            )
            notes.append(
                f"Accuracies differ by up to {shares[0]}; those of equally good paths by "
                f"{shares[1]} on average, rarely by {shares[2]}: {verdict}."
            )
        matrix = self.matrix()
        others = len(self.names) - 1
        fields.append(
            Field.number("differs", lambda e: format_percent(float(matrix[e].sum() / others)))
        )
        fields.append(
            Field.of(
                "differs most from", lambda e: self.names[int(matrix[e].argmax())], optional=True
            )
        )
        notes.append(f"differs: mean {kind} with each of the other paths.")
        return [summary, Table.of(range(len(self.names)), fields, notes=notes)]

    def to_json(self) -> dict[str, Any]:
        """Return everything except the answers."""
        document: dict[str, Any] = {
            "paths": list(self.names),
            "items": self.classes.shape[1],
            "divergence": self.divergence,
            "pairs": self.matrix(),
            "same": self.same,
            "worst_items": self.worst_items(),
        }
        if self.labels is not None:
            ks = [k for k in (1, 3, 5) if k <= self.classes.shape[2]]
            document |= {
                "instability": {f"top{k}": self.instability(k) for k in ks},
                "accuracy": dict(zip(self.names, self.accuracy.tolist(), strict=True)),
                "spread": float(np.ptp(self.accuracy)),
                "spread_by_chance": metric.spread_by_chance(self.right()),
                "growth": self.growth(),
            }
        return document


def format_interval(interval: Interval) -> str:
    """Format an interval of shares for a table."""
    return f"{format_percent(interval.low)} to {format_percent(interval.high)}"


def measure(
    models: Models,
    scenes: Scenes,
    paths: Sequence[DevicePath],
    labels: Sequence[int] | NDArray[np.int64] | None = None,
    *,
    topk: int = 3,
    report: Report = lambda line: None,
) -> Stability:
    """Classify every scene on every path.

    Args:
        models: runtimes by the name in a path's `model`; a single runtime serves all paths.
        scenes: inputs of the first stage: images uint8 [H, W, 3], or files.
        paths: at least two; a `DeviceMatrix` is a sequence of them without its reference.
        labels: the class of each scene; without them only divergence is measured.
        topk: number of answers to store per scene.

    Raises:
        InvalidArgumentError: fewer than two paths, no scenes, or labels that do not match.
        UnknownNameError: a path names a model that is not among `models`.
        RawInputError: a scene is damaged; the error names it.
        ModelError: a model does not return scores.
    """
    paths = list(paths)
    if len(paths) < 2:
        raise InvalidArgumentError(
            "paths",
            f"{len(paths)} given, but disagreement needs two",
            remedy="for example --path reference --path codec:jpeg,quality=50",
        )
    targets = checked_labels(labels, len(scenes))
    classes: list[list[NDArray[np.int64]]] = [[] for _ in paths]
    digests = [hashlib.blake2b(path.model.encode()) for path in paths]
    for scored in scores(models, scenes, paths, report=report):
        for at, (samples, outputs) in enumerate(scored):
            classes[at].append(metric.top_classes(outputs, topk))
            digests[at].update(samples.data)
    _check_classes(targets, outputs.shape[1])
    groups: dict[bytes, list[str]] = {}
    for path, digest in zip(paths, digests, strict=True):
        groups.setdefault(digest.digest(), []).append(path.name)
    return Stability(
        tuple(path.name for path in paths),
        np.stack([np.concatenate(chunks) for chunks in classes]),
        targets,
        tuple(tuple(group) for group in groups.values() if len(group) > 1),
    )


def scores(
    models: Models,
    scenes: Scenes,
    paths: Sequence[DevicePath],
    *,
    report: Report = lambda line: None,
) -> Iterator[list[tuple[NDArray[Any], NDArray[np.float32]]]]:
    """Yield (samples [n, ...], scores [n, C]) by path, for a few scenes at a time.

    Stages that paths share run once per scene. Raises as `measure`.
    """
    if not len(scenes):
        raise InvalidArgumentError("data", "there are no scenes", remedy="pass at least one")
    chosen = [_model(models, path) for path in paths]
    for start in range(0, len(scenes), _CHUNK):
        report(f"scene {start} of {len(scenes)}, {len(paths)} paths")
        chunk = [scenes[n] for n in range(start, min(start + _CHUNK, len(scenes)))]
        memo = Memo(chunk)
        rows: list[list[NDArray[Any]]] = [[] for _ in paths]
        for at in range(len(chunk)):
            for row, path in zip(rows, paths, strict=True):
                try:
                    row.append(memo(path.pipeline, at))
                except RawInputError as error:
                    raise RawInputError(
                        error.what, where=f"scene {start + at}", remedy=error.remedy
                    ) from error
        yield [
            (samples, _scored(model, samples))
            for model, row in zip(chosen, rows, strict=True)
            for samples in [np.ascontiguousarray(row)]
        ]


def _model(models: Models, path: DevicePath) -> Runtime:
    if isinstance(models, Runtime):
        return models
    if path.model not in models:
        raise UnknownNameError("model", path.model, models, where=f"path '{path.name}'")
    return models[path.model]


def _scored(model: Runtime, samples: NDArray[Any]) -> NDArray[np.float32]:
    fitted = fit(samples, model.inputs[0] if model.inputs else None)
    outputs = model.run([fitted])[0]
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        raise ModelError(
            f"{model.name} returned shape {list(outputs.shape)} instead of scores [N, classes]",
            remedy="pass a model whose first output has a score for each class",
        )
    class_scores = outputs.astype(np.float32)
    if not np.isfinite(class_scores).all():
        raise ModelError(f"{model.name} returned NaN or infinity")
    return class_scores


def checked_labels(
    labels: Sequence[int] | NDArray[np.int64] | None, count: int
) -> NDArray[np.int64] | None:
    """Return labels as int64 [N], or None; raise unless they are `count` integers of at least 0."""
    if labels is None:
        return None
    targets = np.asarray(labels)
    if targets.shape != (count,) or targets.dtype.kind not in "iu" or (targets < 0).any():
        raise InvalidArgumentError(
            "labels", f"{targets.dtype}{list(targets.shape)} for {count} scenes",
            remedy="pass one integer of at least 0 per scene; None to measure only divergence",
        )  # fmt: skip
    return targets.astype(np.int64)


def lead_margins(scores: NDArray[np.float32], classes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each scene's score of its class minus the best other score, [N]."""
    _check_classes(classes, scores.shape[1])
    rows = np.arange(len(scores))
    others = scores.astype(np.float64)
    scored = others[rows, classes]
    others[rows, classes] = -np.inf
    return np.asarray(scored - others.max(1))


def _check_classes(labels: NDArray[np.int64] | None, classes: int) -> None:
    if labels is not None and int(labels.max()) >= classes:
        raise InvalidArgumentError(
            "labels", f"class {int(labels.max())} is out of range: the model has {classes}",
            remedy="number the labels as the model's classes",
        )  # fmt: skip
