"""Fine-tune a model for stability between devices, with a plain fine-tune as control.

A plain fine-tune alone can raise instability, so the gain is measured against a control trained
from the same weights, on the same scenes in the same order, for the same epochs. Both are judged
on paths that no twin came from.
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
from slipstream.ship.stability.measuring import Scenes, Stability, format_interval, measure
from slipstream.ship.stability.training import Recipe, fine_tune
from slipstream.ship.stability.twins import (
    Distortion,
    IdenticalTwins,
    Pixels,
    Repeated,
    Twins,
    samples_of,
    twins_named,
)
from slipstream.tables import Field, Table
from slipstream.units import format_percent

if TYPE_CHECKING:
    from torch import nn

_BATCH, _MAX_CALIBRATION = 256, 256
INT8 = "int8"


@dataclass(frozen=True)
class HardeningResult:
    """A hardened model, its control, and the stability of both on held-out paths.

    Attributes:
        model, control: trained copies; the original is unchanged.
        before, control_stability, after: of the original, the control and the hardened model.
        augmented: of a third model trained on twins as scenes; None if not requested.
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
        """Reduction of instability compared with the control."""
        return Reduction.of(unstable(self.control_stability.right()), unstable(self.after.right()))

    @property
    def accuracy_change(self) -> float:
        """Mean accuracy over the paths, hardened minus control."""
        return float(self.after.accuracy.mean() - self.control_stability.accuracy.mean())

    @property
    def _setup(self) -> str:
        return f"{self.twins}, {self.recipe.loss}" + f", {INT8}" * self.recipe.int8

    def tables(self) -> list[Table]:
        """Return a table comparing the models, with the verdict."""
        rows = [
            ("original", self.before),
            ("control: plain fine-tune", self.control_stability),
            *([] if self.augmented is None else [("augmented: twins as scenes", self.augmented)]),
            (f"hardened: {self._setup}", self.after),
        ]
        cells: tuple[Field[tuple[str, Stability]], ...] = (
            Field.of("model", lambda row: row[0]),
            Field.number("instability", lambda row: format_percent(row[1].instability().estimate)),
            Field.number("95 %", lambda row: format_interval(row[1].instability())),
            Field.number("accuracy", lambda row: format_percent(float(row[1].accuracy.mean()))),
            Field.number("worst path", lambda row: format_percent(float(row[1].accuracy.min()))),
            Field.number("classes used", lambda row: str(len(np.unique(row[1].answers)))),
        )
        change = self.reduction
        notes = [
            f"Against the control: {format_percent(-change.reduction.estimate, signed=True)} "
            f"instability ({format_interval(change.reduction)} less, p = {change.p_value:.2g}), "
            f"accuracy {format_percent(self.accuracy_change, signed=True)}.",
            f"{self.after.classes.shape[1]} scenes over {len(self.after.names)} held-out paths.",
        ]
        return [Table.of(rows, cells, "Stability training", notes)]

    def to_json(self) -> dict[str, Any]:
        """Return the contents of the tables."""
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
    """Wrap a torch module as a runtime, or its int8 copy calibrated on `int8_of` [N, ...]."""
    import torch

    from slipstream.ship.stability.int8 import as_int8, following_norms, ranges_of

    rounding: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    if int8_of is not None:
        seen = torch.from_numpy(int8_of)
        rounding = partial(as_int8, model, following_norms(model, seen[:1]), ranges_of(model, seen))

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
    report: Callable[[str], None] = lambda line: None,
) -> HardeningResult:
    """Fine-tune a copy of `model` to answer alike for scenes and twins, and a control copy without.

    Args:
        scenes, labels: training data, uint8 [N, H, W, 3] and int64 [N].
        pipeline: preprocessing from scene to sample.
        held_out: paths to judge on; twins must not come from them. On paths with model ``int8``,
            an int8 copy of each model answers, calibrated on some of `scenes`.
        judged: other scenes and their labels, to judge on.
        twins: a generator, or its name.
        recipe: settings of both fine-tunes.
        augmented: whether to train a third model on twins as scenes, without a stability term.

    Raises:
        InvalidArgumentError, UnknownNameError: as `fine_tune` and `measure`.
        TrainingFailedError: a loss is no longer finite.
    """
    recipe = recipe or Recipe()
    twins = twins_named(twins) if isinstance(twins, str) else twins
    if isinstance(twins, IdenticalTwins) and not recipe.int8:
        raise InvalidArgumentError(
            "twins", "scenes are their own twins, so the stability term is always 0",
            remedy="add --int8, or pass distortion",
        )  # fmt: skip
    # Measure two scenes before training, so that invalid paths or labels fail early.
    measure(runtime_of(model), judged[0][:2], held_out.paths, judged[1][:2], topk=1)
    drawn = Repeated(twins, recipe.draws, len(scenes)) if recipe.draws else twins
    plans: dict[str, tuple[Twins | None, Recipe]] = {
        "control": (None, recipe), "hardened": (drawn, recipe),
    }  # fmt: skip
    if augmented:
        plans["augmented"] = (drawn, replace(recipe, loss="augment"))
    trained = {"original": model}
    for name, (generator, plan_recipe) in plans.items():

        def progress(line: str, name: str = name) -> None:
            report(f"{name}: {line}")

        trained[name] = fine_tune(model, scenes, labels, pipeline, generator, plan_recipe, progress)
    models: dict[str, Runtime] = {
        name: runtime_of(module, name) for name, module in trained.items()
    }
    if any(path.model == INT8 for path in held_out):
        samples = samples_of(scenes[:_MAX_CALIBRATION], pipeline)
        models |= {
            name + INT8: runtime_of(module, name, samples) for name, module in trained.items()
        }
    stabilities = _side_by_side(list(trained), models, judged, held_out, report)
    return HardeningResult(
        trained["hardened"], trained["control"], stabilities["original"], stabilities["control"],
        stabilities["hardened"], recipe, twins.name, stabilities.get("augmented"),
    )  # fmt: skip


def _side_by_side(
    trained: Sequence[str], models: Mapping[str, Runtime],
    judged: tuple[Scenes, NDArray[np.int64]], held_out: DeviceMatrix, report: Callable[[str], None],
) -> dict[str, Stability]:  # fmt: skip
    """Measure every model on the same paths, whose samples are computed once."""
    paths = [
        DevicePath(f"{name}: {path.name}", path.pipeline, name + path.model)
        for name in trained
        for path in held_out.paths
    ]
    combined = measure(models, judged[0], paths, judged[1], topk=1, report=report)
    names = tuple(path.name for path in held_out.paths)
    parts = np.split(combined.classes, len(trained))
    return {
        name: Stability(names, part, combined.labels)
        for name, part in zip(trained, parts, strict=True)
    }
