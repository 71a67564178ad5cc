"""Pipelines of stages: run, serialize, hash and vary them."""

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

# Maximum length of a displayed setting; vocabularies have thousands of characters.
_MAX_SHOWN = 60
# Limits of settings that a file may have: sizes in samples or pixels, and repetitions of a stage.
_MAX_SIZE, _MAX_TIMES = 1 << 24, 100


class RawInputError(SlipstreamError):
    """A raw input is damaged, or not of the kind that the pipeline reads."""


@dataclass(frozen=True)
class Stage:
    """A step of a pipeline; every kind is a frozen dataclass of settings.

    Defining a subclass with a `name` registers it, so that other packages can add kinds of stages.

    Attributes:
        name: name of the kind in logs and messages.
        family: family of pipelines, ``image``, ``audio`` or ``text``; empty for any.
        order: usual position among the stages of its family.
        optional: whether omitting the stage equals its default settings.
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
        """Apply the stage."""
        raise NotImplementedError

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        """Yield common mistakes: a description, and this stage with the mistake."""
        return iter(())

    def code(self) -> str:
        """Return Python code that does the same, for users who fix their preprocessing."""
        return f"x = {self!r}(x)"

    def to_dict(self) -> dict[str, Any]:
        """Return the kind and all settings as JSON."""
        return {"stage": self.name, **asdict(self)}

    @staticmethod
    def from_dict(described: Mapping[str, Any]) -> Stage:
        """Restore a stage from `to_dict`.

        Raises:
            UnknownNameError: the kind is unknown.
            InvalidArgumentError: settings are missing, unknown or invalid.
        """
        name = described.get("stage")
        kind = Stage.kinds.get(str(name))
        if kind is None:
            raise UnknownNameError("stage of preprocessing", str(name), Stage.kinds)
        values = {key: value for key, value in described.items() if key != "stage"}
        required = {field.name: field.default is MISSING for field in fields(kind)}
        missing = {key for key, needed in required.items() if needed} - values.keys()
        if wrong := missing | (values.keys() - required.keys()):
            text = f"missing or unknown settings: {', '.join(sorted(wrong))}"
            raise InvalidArgumentError(str(name), text)
        types = get_type_hints(kind)
        settings = {}
        for key, value in values.items():
            settings[key] = read(types[key], value, f"{name}.{key}", {})
            limit = _MAX_TIMES if key == "times" else _MAX_SIZE
            if isinstance(settings[key], int) and settings[key] > limit:
                raise InvalidArgumentError(f"{name}.{key}", f"{value} is more than {limit}")
        return kind(**settings)

    def changed(self, **settings: Any) -> Self:
        """Return a copy with other settings."""
        return replace(self, **settings)


@dataclass(frozen=True)
class Variation:
    """A pipeline with one or more changed stages.

    Attributes:
        text: description of the change: "channels in the order BGR".
        pipeline: the changed pipeline.
        changes: (position, original stage, changed stage).
    """

    text: str
    pipeline: Pipeline
    changes: tuple[tuple[int, Stage, Stage], ...]

    @property
    def stages(self) -> tuple[str, ...]:
        """Kinds of the changed stages."""
        return tuple(right.name for _, right, _ in self.changes)


@dataclass(frozen=True)
class Pipeline:
    """Stages that are applied in order to one raw input.

    Attributes:
        stages: the first reads a raw input (an image file's bytes or pixels, samples of sound,
            text), the last returns one sample without the batch axis.
    """

    stages: tuple[Stage, ...]

    def __call__(self, raw: Any) -> Array:
        """Return one sample of the model's input.

        Raises:
            RawInputError: `raw` is damaged or of the wrong kind.
        """
        value = raw
        for stage in self.stages:
            try:
                value = stage(value)
            except SlipstreamError:
                raise
            except (ValueError, TypeError, IndexError, ArithmeticError, MemoryError) as error:
                what = f"the stage {stage.name} does not accept this input: {error}"
                raise RawInputError(what, remedy="compare its settings with the input") from error
        return np.ascontiguousarray(value)

    def batch(self, raws: Sequence[Any]) -> Array:
        """Return samples [N, ...] of N raw inputs.

        Raises:
            RawInputError: an input is damaged; names its index.
            InvalidArgumentError: there are no inputs, or samples have different shapes.
        """
        samples = []
        for number, raw in enumerate(raws):
            try:
                samples.append(self(raw))
            except RawInputError as error:
                raise RawInputError(
                    error.what, where=f"raw input {number}", remedy=error.remedy
                ) from error
        shapes = {sample.shape for sample in samples}
        if len(shapes) != 1:
            raise InvalidArgumentError(
                "raws",
                f"samples have different shapes: {sorted(shapes)}" if samples else "it is empty",
                remedy="add a stage that sets the size, such as resize" if samples else
                "pass at least one",
            )  # fmt: skip
        return np.stack(samples)

    def trace(self, raw: Any) -> dict[str, Any]:
        """Return the output of every stage for one raw input, in order, by kind."""
        values: dict[str, Any] = {}
        value = raw
        for number, stage in enumerate(self.stages):
            value = stage(value)
            values[stage.name if stage.name not in values else f"{stage.name}_{number}"] = value
        return values

    def with_stage(self, stage: Stage) -> Pipeline:
        """Replace the stage of the same kind, or insert `stage` at its usual position.

        Raises:
            InvalidArgumentError: there are several stages of its kind.
        """
        at = [n for n, present in enumerate(self.stages) if present.name == stage.name]
        if len(at) > 1:
            raise InvalidArgumentError("stage", f"there are {len(at)} stages {stage.name}")
        if at:
            return Pipeline((*self.stages[: at[0]], stage, *self.stages[at[0] + 1 :]))
        later = (n for n, present in enumerate(self.stages) if present.order > stage.order)
        place = next(later, len(self.stages))
        return Pipeline((*self.stages[:place], stage, *self.stages[place:]))

    def completed(self) -> Pipeline:
        """Insert the missing optional stages of the pipeline's families, so that they can vary."""
        pipeline, names = self, {stage.name for stage in self.stages}
        families = {stage.family for stage in self.stages if stage.family}
        for kind in Stage.kinds.values():
            if kind.optional and kind.family in families and kind.name not in names:
                pipeline = pipeline.with_stage(kind())
        return pipeline

    def variations(self) -> Iterator[Variation]:
        """Yield every pipeline with a common mistake in one stage, without duplicates."""
        whole, seen = self.completed(), set()
        for number, right in enumerate(whole.stages):
            for text, wrong in right.bugs():
                if wrong == right or (number, wrong) in seen:
                    continue
                seen.add((number, wrong))
                stages = (*whole.stages[:number], wrong, *whole.stages[number + 1 :])
                yield Variation(text, Pipeline(stages), ((number, right, wrong),))

    def pairs(self, among: Sequence[Variation] | None = None) -> Iterator[Variation]:
        """Yield combinations of two variations, of different stages.

        Args:
            among: variations to combine; None for all.
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
        """Return the stages as JSON."""
        return {"stages": [stage.to_dict() for stage in self.stages]}

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> Pipeline:
        """Restore a pipeline from `to_dict`; see `Stage.from_dict` for the errors raised."""
        stages = read(Sequence[Mapping[str, Any]], described.get("stages", ()), "stages", {})
        return cls(tuple(Stage.from_dict(stage) for stage in stages))

    @cached_property
    def hash(self) -> str:
        """Hash of all settings, 16 hexadecimal digits."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def code(self) -> str:
        """Return Python code that does what the stages do."""
        return "\n".join(stage.code() for stage in self.stages)

    def __str__(self) -> str:
        return " -> ".join(
            stage.name + "".join(f" {key}={_short(value)}" for key, value in asdict(stage).items())
            for stage in self.stages
        )


def _short(value: Any) -> str:
    text = "/".join(map(_short, value)) if isinstance(value, tuple) else repr(value).strip("'")
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class Memo:
    """Cache of pipelines over the same raw inputs, which computes common stages once.

    Args:
        raws: the inputs.
        max_bytes: maximum size of cached values; the least recently used are evicted first.
    """

    def __init__(self, raws: Sequence[Any], max_bytes: int = 256 << 20) -> None:
        self.raws = raws
        self._max_bytes, self._bytes = max_bytes, 0
        self._cache: OrderedDict[tuple[int, tuple[Stage, ...]], Any] = OrderedDict()

    def __call__(self, pipeline: Pipeline, index: int) -> Any:
        """Return the sample of raw input `index`, which the caller must not modify.

        Raises:
            RawInputError: the input is damaged.
        """
        stages = pipeline.stages
        done = next((n for n in range(len(stages), 0, -1) if (index, stages[:n]) in self._cache), 0)
        value = self._cache[index, stages[:done]] if done else self.raws[index]
        if done:
            self._cache.move_to_end((index, stages[:done]))
        for number in range(done, len(stages)):
            value = stages[number](value)
            self._store((index, stages[: number + 1]), value)
        return value

    def _store(self, key: tuple[int, tuple[Stage, ...]], value: Any) -> None:
        self._cache[key] = value
        self._bytes += getattr(value, "nbytes", 1024)
        while self._bytes > self._max_bytes and len(self._cache) > 1:
            _, evicted = self._cache.popitem(last=False)
            self._bytes -= getattr(evicted, "nbytes", 1024)
