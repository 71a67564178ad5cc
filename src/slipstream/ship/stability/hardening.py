"""Harden a model against its devices, beside the plain fine-tune that it has to beat.

A plain fine-tune can raise instability by itself, so that a gain over the model as it came says
little: the control is trained from the same weights, over the same scenes in the same order, for as
many epochs, and both are judged on paths that no twin came from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream.measure.instability import Reduction, unstable
from slipstream.runtimes import Runtime
from slipstream.runtimes.paths import DeviceMatrix, DevicePath
from slipstream.runtimes.preprocessing import Pipeline
from slipstream.runtimes.python import CallableRuntime
from slipstream.ship.stability.measuring import Scenes, Stability, ends, measure
from slipstream.ship.stability.training import Recipe, fine_tune
from slipstream.ship.stability.twins import (
    Distortion,
    Pixels,
    Repeated,
    Same,
    Twins,
    samples_of,
    twins_named,
)
from slipstream.tables import Field, Table
from slipstream.units import format_percent

if TYPE_CHECKING:
    from torch import nn

_BATCH, _CALIBRATED = 256, 256
INT8 = "int8"


@dataclass(frozen=True)
class Hardened:
    """A hardened model, its control, and what the held-out paths say of both.

    Attributes:
        model, control: trained copies; what was given is left as it was.
        before, control_stability, after: on the held-out paths, of the model as it was given, of
            the control, and of the hardened one.
        augmented: of a third that learned twins as scenes, if it was asked for.
    """

    model: nn.Module = field(repr=False)
    control: nn.Module = field(repr=False)
    before: Stability
    control_stability: Stability
    after: Stability
    recipe: Recipe
    twins: str
    augmented: Stability | None = None

    @property
    def reduction(self) -> Reduction:
        """Of instability against the control."""
        return Reduction.of(unstable(self.control_stability.right()), unstable(self.after.right()))

    @property
    def accuracy_change(self) -> float:
        """Mean accuracy over the paths, hardened minus control."""
        return float(self.after.accuracy.mean() - self.control_stability.accuracy.mean())

    @property
    def _how(self) -> str:
        return f"{self.twins}, {self.recipe.loss}" + f", {INT8}" * self.recipe.int8

    def tables(self) -> list[Table]:
        """The three models side by side, and the verdict."""
        rows = [
            ("as given", self.before),
            ("control: plain fine-tune", self.control_stability),
            *([] if self.augmented is None else [("twins learned as scenes", self.augmented)]),
            (f"hardened: {self._how}", self.after),
        ]
        cells: tuple[Field[tuple[str, Stability]], ...] = (
            Field.of("model", lambda row: row[0]),
            Field.number("instability", lambda row: format_percent(row[1].instability().estimate)),
            Field.number("95 %", lambda row: ends(row[1].instability())),
            Field.number("accuracy", lambda row: format_percent(float(row[1].accuracy.mean()))),
            Field.number("worst path", lambda row: format_percent(float(row[1].accuracy.min()))),
            Field.number("classes used", lambda row: str(len(np.unique(row[1].answers)))),
        )
        change = self.reduction
        notes = [
            f"Against the control: {format_percent(-change.reduction.estimate, signed=True)} "
            f"instability ({ends(change.reduction)} less, p = {change.p_value:.2g}), accuracy "
            f"{format_percent(self.accuracy_change, signed=True)}.",
            f"{self.after.classes.shape[1]} scenes over {len(self.after.names)} held-out paths.",
        ]
        return [Table.of(rows, cells, "Stability training", notes)]

    def to_json(self) -> dict[str, Any]:
        """Everything the tables are made of."""
        return {
            "before": self.before.to_json(),
            "control": self.control_stability.to_json(),
            "hardened": self.after.to_json(),
            "augmented": None if self.augmented is None else self.augmented.to_json(),
            "reduction": self.reduction,
            "accuracy_change": self.accuracy_change,
            "recipe": self.recipe,
            "twins": self.twins,
        }


def runtime_of(
    model: nn.Module, name: str = "model", int8_of: NDArray[Any] | None = None
) -> CallableRuntime:
    """A torch module as the measurement calls it: arrays [N, ...] to scores [N, C].

    Args:
        int8_of: samples [N, ...] that ranges are calibrated on; the module then computes as its
            int8 copy does.
    """
    import torch

    from slipstream.ship.stability.int8 import as_int8, norms_behind, ranges_of

    rounding: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    if int8_of is not None:
        seen = torch.from_numpy(int8_of)
        rounding = partial(as_int8, model, norms_behind(model, seen[:1]), ranges_of(model, seen))

    def run(samples: NDArray[Any]) -> NDArray[Any]:
        model.eval()
        with torch.inference_mode(), rounding():
            parts = torch.from_numpy(samples).split(_BATCH)
            return torch.cat([model(part) for part in parts]).numpy()

    return CallableRuntime(name, run)


def harden(
    model: nn.Module,
    scenes: Pixels,
    labels: NDArray[np.int64],
    pipeline: Pipeline,
    *,
    held_out: DeviceMatrix,
    judged: tuple[Scenes | Pixels, NDArray[np.int64]],
    twins: Twins | str = Distortion.name,
    recipe: Recipe | None = None,
    augmented: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Hardened:
    """Fine-tune a copy of `model` to give scenes and twins one answer, and a copy without.

    Args:
        scenes, labels: to train on, uint8 [N, H, W, 3] and int64 [N].
        pipeline: from a scene to a sample, as the model was trained.
        held_out: paths to judge on; twins must not come from them. On those whose model is
            ``int8``, an int8 copy of each model answers, calibrated on some of `scenes`.
        judged: other scenes and their labels, to judge on.
        twins: their generator, or its name.
        recipe: of both fine-tunes.
        augmented: train a third that learns twins as scenes, without a stability term.

    Raises:
        InvalidArgumentError, UnknownNameError: as `fine_tune` and `measure`.
        TrainingFailedError: a loss is no number any more.
    """
    recipe = recipe or Recipe()
    twins = twins_named(twins) if isinstance(twins, str) else twins
    if isinstance(twins, Same) and not recipe.int8:
        raise InvalidArgumentError(
            "twins", "scenes are their own twins, and nothing would be learned",
            remedy="--int8 with it, or distortion",
        )  # fmt: skip
    # Two scenes before the training, so that paths or labels which do not work fail early.
    measure(runtime_of(model), judged[0][:2], held_out.paths, judged[1][:2], topk=1)
    drawn = Repeated(twins, recipe.draws, len(scenes)) if recipe.draws else twins
    plans: dict[str, tuple[Twins | None, Recipe]] = {
        "control": (None, recipe), "hardened": (drawn, recipe),
    }  # fmt: skip
    if augmented:
        plans["augmented"] = (drawn, replace(recipe, loss="augment"))
    trained = {"given": model}
    for name, (generator, plan_recipe) in plans.items():

        def tell(line: str, name: str = name) -> None:
            say(f"{name}: {line}")

        trained[name] = fine_tune(model, scenes, labels, pipeline, generator, plan_recipe, tell)
    models: dict[str, Runtime] = {name: runtime_of(one, name) for name, one in trained.items()}
    if any(path.model == INT8 for path in held_out):
        some = samples_of(scenes[:_CALIBRATED], pipeline)
        models |= {name + INT8: runtime_of(one, name, some) for name, one in trained.items()}
    stabilities = _side_by_side(list(trained), models, judged, held_out, say)
    return Hardened(
        trained["hardened"], trained["control"], stabilities["given"], stabilities["control"],
        stabilities["hardened"], recipe, twins.name, stabilities.get("augmented"),
    )  # fmt: skip


def _side_by_side(
    trained: Sequence[str], models: Mapping[str, Runtime],
    judged: tuple[Scenes, NDArray[np.int64]], held_out: DeviceMatrix, say: Callable[[str], None],
) -> dict[str, Stability]:  # fmt: skip
    """Every model on the same paths, whose samples are made once for all of them."""
    paths = [
        DevicePath(f"{name}: {path.name}", path.pipeline, name + path.model)
        for name in trained
        for path in held_out.paths
    ]
    whole = measure(models, judged[0], paths, judged[1], topk=1, say=say)
    names = tuple(path.name for path in held_out.paths)
    parts = np.split(whole.classes, len(trained))
    return {
        name: Stability(names, part, whole.labels)
        for name, part in zip(trained, parts, strict=True)
    }
