"""A pipeline as a value: stages with settings, written down, hashed, varied, and run."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self, get_type_hints

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError, SlipstreamError, UnknownNameError
from slipstream.schema import read

Array = NDArray[Any]

# Characters of a setting: a vocabulary has thousands.
_MOST_SHOWN = 60
# Of what a file may say: samples of a recording, pixels of a side; how often a stage is applied.
_MAX_SIZE, _MAX_TIMES = 1 << 24, 100


class RawInputError(SlipstreamError):
    """A raw input is damaged, or not what a pipeline's first stage reads."""


@dataclass(frozen=True)
class Stage:
    """One step of a pipeline; every kind is a frozen dataclass of settings.

    A subclass is known by its `name` as soon as it is defined, so that another room, or a user, may
    bring its own kind of stage.

    Attributes:
        name: of the kind, as logs and messages write it.
        family: ``image``, ``audio``, ``text``: which pipelines it may stand in; empty for any.
        order: where it usually stands among its family.
        optional: whether leaving it out is the same as its default settings.
    """

    name: ClassVar[str] = ""
    family: ClassVar[str] = ""
    order: ClassVar[int] = 0
    optional: ClassVar[bool] = False
    kinds: ClassVar[dict[str, type[Stage]]] = {}

    def __init_subclass__(cls) -> None:
        if cls.name:
            Stage.kinds[cls.name] = cls

    def __call__(self, value: Any) -> Any:
        """What the stage makes of `value`."""
        raise NotImplementedError

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        """This stage as people get it wrong: words, and the stage that does so."""
        return iter(())

    def code(self) -> str:
        """A line of Python that does the same, for whoever mends their own preprocessing."""
        return f"x = {self!r}(x)"

    def to_dict(self) -> dict[str, Any]:
        """The kind and every setting."""
        return {"stage": self.name, **asdict(self)}

    @staticmethod
    def from_dict(described: Mapping[str, Any]) -> Stage:
        """A stage that `to_dict` described.

        Raises:
            UnknownNameError: of a kind that is not known here.
            InvalidArgumentError: its settings are not those of its kind.
        """
        name = described.get("stage")
        kind = Stage.kinds.get(str(name))
        if kind is None:
            raise UnknownNameError("stage of preprocessing", str(name), Stage.kinds)
        given = {key: value for key, value in described.items() if key != "stage"}
        known = {one.name: one for one in fields(kind)}
        lacking = [key for key, one in known.items() if one.default is MISSING and key not in given]
        if lacking or not given.keys() <= known.keys():
            strange = ", ".join([*lacking, *(given.keys() - known.keys())])
            raise InvalidArgumentError(str(name), f"it lacks or does not know: {strange}")
        types = get_type_hints(kind)
        settings = {}
        for key, value in given.items():
            settings[key] = read(types[key], value, f"{name}.{key}", {})
            most = _MAX_TIMES if key == "times" else _MAX_SIZE
            if isinstance(settings[key], int) and settings[key] > most:
                raise InvalidArgumentError(f"{name}.{key}", f"{value} is more than {most}")
        return kind(**settings)

    def changed(self, **settings: Any) -> Self:
        """A copy with other settings."""
        return replace(self, **settings)


@dataclass(frozen=True)
class Variation:
    """A pipeline of which one stage, or a few, is done otherwise.

    Attributes:
        text: what is otherwise, in words: "channels in the order BGR".
        pipeline: the whole pipeline with it.
        changes: (position, the stage as it should be, the stage as it is).
    """

    text: str
    pipeline: Pipeline
    changes: tuple[tuple[int, Stage, Stage], ...]

    @property
    def stages(self) -> tuple[str, ...]:
        """Kinds of the stages that differ."""
        return tuple(right.name for _, right, _ in self.changes)


@dataclass(frozen=True)
class Pipeline:
    """Stages, applied one after the other to one raw input.

    Attributes:
        stages: the first reads a raw input (an image file's bytes or pixels, samples of sound,
            text), the last gives one sample without the batch axis.
    """

    stages: tuple[Stage, ...]

    def __call__(self, raw: Any) -> Array:
        """One sample, as the model takes it.

        Raises:
            RawInputError: `raw` is damaged, or no such input.
        """
        value = raw
        for stage in self.stages:
            try:
                value = stage(value)
            except SlipstreamError:
                raise
            except (ValueError, TypeError, IndexError, ArithmeticError, MemoryError) as error:
                what = f"the stage {stage.name} does not take this input: {error}"
                raise RawInputError(what, remedy="compare its settings with the input") from error
        return np.ascontiguousarray(value)

    def batch(self, raws: Sequence[Any]) -> Array:
        """Samples [N, ...] of N raw inputs.

        Raises:
            RawInputError: one is damaged; it says which.
            InvalidArgumentError: there are none, or they come out in different shapes.
        """
        samples = []
        for number, raw in enumerate(raws):
            try:
                samples.append(self(raw))
            except RawInputError as error:
                raise RawInputError(
                    error.what, where=f"raw input {number}", remedy=error.remedy
                ) from error
        shapes = {one.shape for one in samples}
        if len(shapes) != 1:
            raise InvalidArgumentError(
                "raws", f"they come out as {sorted(shapes)}" if samples else "there are none",
                remedy="a stage that gives all the same size, such as resize, is missing",
            )  # fmt: skip
        return np.stack(samples)

    def trace(self, raw: Any) -> dict[str, Any]:
        """What every stage gives for one raw input, in order, by the stage's kind."""
        values: dict[str, Any] = {}
        value = raw
        for number, stage in enumerate(self.stages):
            value = stage(value)
            values[stage.name if stage.name not in values else f"{stage.name}_{number}"] = value
        return values

    def with_stage(self, stage: Stage) -> Pipeline:
        """With `stage` in the place of the one of its kind, or at its usual place if there is none.

        Raises:
            InvalidArgumentError: there are several of its kind.
        """
        at = [n for n, one in enumerate(self.stages) if one.name == stage.name]
        if len(at) > 1:
            raise InvalidArgumentError("stage", f"there are {len(at)} stages {stage.name}")
        if at:
            return Pipeline((*self.stages[: at[0]], stage, *self.stages[at[0] + 1 :]))
        later = [n for n, one in enumerate(self.stages) if one.order > stage.order]
        place = later[0] if later else len(self.stages)
        return Pipeline((*self.stages[:place], stage, *self.stages[place:]))

    def completed(self) -> Pipeline:
        """The same with every optional stage of its families written out, so that it may vary."""
        pipeline, names = self, {one.name for one in self.stages}
        families = {one.family for one in self.stages if one.family}
        for kind in Stage.kinds.values():
            if kind.optional and kind.family in families and kind.name not in names:
                pipeline = pipeline.with_stage(kind())
        return pipeline

    def variations(self) -> Iterator[Variation]:
        """Everything that is plausibly done otherwise in one stage, each once."""
        whole, seen = self.completed(), set()
        for number, right in enumerate(whole.stages):
            for text, wrong in right.bugs():
                if wrong == right or (number, wrong) in seen:
                    continue
                seen.add((number, wrong))
                stages = (*whole.stages[:number], wrong, *whole.stages[number + 1 :])
                yield Variation(text, Pipeline(stages), ((number, right, wrong),))

    def pairs(self, among: Sequence[Variation] | None = None) -> Iterator[Variation]:
        """Two of the single variations at once, of two different stages.

        Args:
            among: the single ones to combine; None for all.
        """
        single = list(self.variations()) if among is None else list(among)
        for number, first in enumerate(single):
            for second in single[number + 1 :]:
                (at, right, wrong), (other, *_) = second.changes[0], first.changes[0]
                if at == other:
                    continue
                stages = list(first.pipeline.stages)
                stages[at] = wrong
                yield Variation(
                    f"{first.text}; {second.text}", Pipeline(tuple(stages)),
                    (*first.changes, (at, right, wrong)),
                )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """As a log holds it: JSON has all of it."""
        return {"stages": [stage.to_dict() for stage in self.stages]}

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> Pipeline:
        """What `to_dict` described.

        Raises:
            UnknownNameError: a stage of an unknown kind.
            InvalidArgumentError: a stage's settings are not those of its kind.
        """
        stages = read(Sequence[Mapping[str, Any]], described.get("stages", ()), "stages", {})
        return cls(tuple(Stage.from_dict(stage) for stage in stages))

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits that no other pipeline has."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def code(self) -> str:
        """Lines of Python that do what the stages do."""
        return "\n".join(stage.code() for stage in self.stages)

    def __str__(self) -> str:
        return " -> ".join(
            stage.name + "".join(f" {key}={_short(value)}" for key, value in asdict(stage).items())
            for stage in self.stages
        )


def _short(value: Any) -> str:
    text = "/".join(map(_short, value)) if isinstance(value, tuple) else repr(value).strip("'")
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


class Memo:
    """Pipelines over the same raw inputs, what they have in common computed once.

    Args:
        raws: the inputs.
        most_bytes: of intermediate values that are kept; the oldest go first.
    """

    def __init__(self, raws: Sequence[Any], most_bytes: int = 256 << 20) -> None:
        self.raws = raws
        self._most, self._held = most_bytes, 0
        self._kept: OrderedDict[tuple[int, tuple[Stage, ...]], Any] = OrderedDict()

    def __call__(self, pipeline: Pipeline, index: int) -> Any:
        """What `pipeline` makes of raw input `index`; not to be written into.

        Raises:
            RawInputError: it is damaged.
        """
        stages = pipeline.stages
        done = next((n for n in range(len(stages), 0, -1) if (index, stages[:n]) in self._kept), 0)
        value = self._kept[index, stages[:done]] if done else self.raws[index]
        if done:
            self._kept.move_to_end((index, stages[:done]))
        for number in range(done, len(stages)):
            value = stages[number](value)
            self._keep((index, stages[: number + 1]), value)
        return value

    def _keep(self, key: tuple[int, tuple[Stage, ...]], value: Any) -> None:
        self._kept[key] = value
        self._held += getattr(value, "nbytes", 1024)
        while self._held > self._most and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self._held -= getattr(gone, "nbytes", 1024)
