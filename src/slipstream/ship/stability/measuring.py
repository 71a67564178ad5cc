"""Instability over device paths, measured: every path answers for every scene."""

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
Say = Callable[[str], None]
# Scenes whose samples are in memory at a time, for every path.
_CHUNK = 16
_FEW = 12


@dataclass(frozen=True)
class Stability:
    """What every path answered to every scene.

    Attributes:
        names: of the paths, E of them.
        classes: int64 [E, N, K], the K classes of the highest scores, the highest first.
        labels: int64 [N]; None where there are none, and only divergence is known.
        same: groups of paths whose samples were the same bytes: each is one device.
    """

    names: tuple[str, ...]
    classes: NDArray[np.int64]
    labels: NDArray[np.int64] | None = None
    same: tuple[tuple[str, ...], ...] = ()

    def right(self, k: int = 1) -> NDArray[np.bool_]:
        """Whether the label is among the first `k` answers, bool [E, N].

        Raises:
            InvalidArgumentError: there are no labels, or fewer answers.
        """
        if self.labels is None:
            raise InvalidArgumentError("labels", "there are none: only divergence is known")
        if not 1 <= k <= self.classes.shape[2]:
            raise InvalidArgumentError("topk", f"{k} of {self.classes.shape[2]} answers")
        return metric.right_of(self.classes[:, :, :k], self.labels)

    @property
    def answers(self) -> NDArray[np.int64]:
        """The classes of the highest scores, [E, N]."""
        return self.classes[:, :, 0]

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """Of each path, [E]."""
        return np.asarray(self.right().mean(1))

    def instability(self, k: int = 1) -> Interval:
        """Share of scenes that some path has right and another wrong, with Wilson's interval."""
        return metric.share(metric.unstable(self.right(k)))

    @property
    def divergence(self) -> Interval:
        """Share of scenes whose answers are not all the same; needs no labels."""
        return metric.share(metric.diverging(self.answers))

    def matrix(self, k: int = 1) -> NDArray[np.float64]:
        """Instability of every pair of paths, [E, E]; divergence where there are no labels."""
        return metric.pairwise(self.answers if self.labels is None else self.right(k))

    def growth(self) -> NDArray[np.float64]:
        """Mean instability of 2, 3, ... E of the paths, [E - 1]."""
        return metric.growth(self.right())

    def worst_items(self, count: int = 20) -> list[int]:
        """Scenes about which the paths agree least, the most disputed first."""
        if self.labels is not None:
            votes = self.right().sum(0)
        else:
            votes = (self.answers == self.answers[:1]).sum(0)
        disputed = np.minimum(votes, len(self.names) - votes)
        order = np.argsort(-disputed, kind="stable")
        return [int(one) for one in order[:count] if disputed[one]]

    def tables(self) -> list[Table]:
        """The finding, and a line a path."""
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
            [(name, format_percent(one.estimate), ends(one)) for name, one in headline],
            f"{self.classes.shape[1]} scenes over {len(self.names)} device paths",
            [
                f"Mean {kind} of two paths: {format_percent(float(pairs.mean()))}.",
                *([f"It grows with the number of paths ({grown})."] if grown else []),
                *(f"One device, not several: {', '.join(one)} give the same bytes."
                  for one in self.same),
            ],
        )  # fmt: skip
        lines = list(range(len(self.names)))
        fields: list[Field[int]] = [Field.of("path", lambda e: self.names[e])]
        notes = []
        if self.labels is not None:
            accuracy = self.accuracy
            fields.append(Field.number("accuracy", lambda e: format_percent(float(accuracy[e]))))
            spread = float(np.ptp(accuracy))
            mean, most = metric.spread_by_chance(self.right())
            shares = [format_percent(one) for one in (spread, mean, most)]
            verdict = "no path is shown to be worse" if spread <= most else "some path is worse"
            notes.append(
                f"Accuracies lie within {shares[0]} of each other, those of equally good paths "
                f"within {shares[1]}, seldom {shares[2]}: {verdict}."
            )
        matrix = self.matrix()
        others = len(self.names) - 1
        fields.append(
            Field.number("differs", lambda e: format_percent(float(matrix[e].sum() / others)))
        )
        fields.append(
            Field.of("most from", lambda e: self.names[int(matrix[e].argmax())], optional=True)
        )
        notes.append(f"differs: mean {kind} with each of the other paths.")
        return [summary, Table.of(lines, fields, notes=notes)]

    def to_json(self) -> dict[str, Any]:
        """All of it but the answers themselves."""
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


def ends(one: Interval) -> str:
    """An interval of shares, for a table."""
    return f"{format_percent(one.low)} to {format_percent(one.high)}"


def measure(
    models: Models,
    scenes: Scenes,
    paths: Sequence[DevicePath],
    labels: Sequence[int] | NDArray[np.int64] | None = None,
    *,
    topk: int = 3,
    say: Say = lambda line: None,
) -> Stability:
    """Let every path answer for every scene.

    Args:
        models: what runs on the devices, by the names that paths give their `model`; a model by
            itself is every path's.
        scenes: what the first stage of a path reads: pictures uint8 [H, W, 3], or files.
        paths: two at least; a `DeviceMatrix` is a sequence of them without its reference.
        labels: the class of each scene; without them only divergence is measured.
        topk: answers that are kept of each scene.

    Raises:
        InvalidArgumentError: one path only, no scenes, labels of other scenes.
        UnknownNameError: a path names a model that is not among `models`.
        RawInputError: a scene is damaged; it says which.
        ModelError: a model does not answer with scores.
    """
    paths = list(paths)
    if len(paths) < 2:
        raise InvalidArgumentError(
            "paths",
            f"{len(paths)} of them, and one cannot disagree with itself",
            remedy="two at least: --path reference --path codec:jpeg,quality=50",
        )
    wanted = checked_labels(labels, len(scenes))
    classes: list[list[NDArray[np.int64]]] = [[] for _ in paths]
    digests = [hashlib.blake2b(one.model.encode()) for one in paths]
    for scored in scores(models, scenes, paths, say=say):
        for at, (samples, given) in enumerate(scored):
            classes[at].append(metric.top_classes(given, topk))
            digests[at].update(samples.data)
    _check_classes(wanted, given.shape[1])
    groups: dict[bytes, list[str]] = {}
    for one, digest in zip(paths, digests, strict=True):
        groups.setdefault(digest.digest(), []).append(one.name)
    return Stability(
        tuple(one.name for one in paths),
        np.stack([np.concatenate(one) for one in classes]),
        wanted,
        tuple(tuple(group) for group in groups.values() if len(group) > 1),
    )


def scores(
    models: Models, scenes: Scenes, paths: Sequence[DevicePath], *, say: Say = lambda line: None
) -> Iterator[list[tuple[NDArray[Any], NDArray[np.float32]]]]:
    """For a few scenes at a time, by path: (samples [n, ...], scores [n, C]).

    What paths have in common is computed once for each scene, and forgotten with it.

    Raises:
        as `measure`.
    """
    if not len(scenes):
        raise InvalidArgumentError("data", "there are no scenes", remedy="one at least")
    chosen = [_model(models, one) for one in paths]
    for start in range(0, len(scenes), _CHUNK):
        say(f"scene {start} of {len(scenes)}, {len(paths)} paths")
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
    given = model.run([fitted])[0]
    if given.ndim != 2 or given.shape[1] < 2:
        raise ModelError(
            f"{model.name} answers with {list(given.shape)}, and scores [N, classes] are meant",
            remedy="give a model whose first output has a score for each class",
        )
    class_scores = given.astype(np.float32)
    if not np.isfinite(class_scores).all():
        raise ModelError(f"{model.name} answers with numbers that are not finite")
    return class_scores


def checked_labels(
    labels: Sequence[int] | NDArray[np.int64] | None, count: int
) -> NDArray[np.int64] | None:
    """Labels as int64 [N].

    Raises:
        InvalidArgumentError: not one whole number, 0 or above, for each of `count` scenes.
    """
    if labels is None:
        return None
    wanted = np.asarray(labels)
    if wanted.shape != (count,) or wanted.dtype.kind not in "iu" or (wanted < 0).any():
        raise InvalidArgumentError(
            "labels", f"{wanted.dtype}{list(wanted.shape)} for {count} scenes",
            remedy="one class, 0 or above, for each scene; None for divergence alone",
        )  # fmt: skip
    return wanted.astype(np.int64)


def leads(scores: NDArray[np.float32], classes: NDArray[np.int64]) -> NDArray[np.float64]:
    """How far each scene's class leads the best of the others, [N]; below 0 where it does not.

    Raises:
        InvalidArgumentError: a class that the model does not know.
    """
    _check_classes(classes, scores.shape[1])
    rows = np.arange(len(scores))
    others = scores.astype(np.float64)
    scored = others[rows, classes]
    others[rows, classes] = -np.inf
    return np.asarray(scored - others.max(1))


def _check_classes(labels: NDArray[np.int64] | None, classes: int) -> None:
    if labels is not None and int(labels.max()) >= classes:
        raise InvalidArgumentError(
            "labels", f"class {int(labels.max())} of a model that knows {classes}",
            remedy="number the labels as the model does",
        )  # fmt: skip
