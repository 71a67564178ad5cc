"""Open the models, scenes and paths that a command names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream import runtimes
from slipstream.errors import InvalidArgumentError
from slipstream.runtimes import Runtime
from slipstream.runtimes.paths import DeviceMatrix, DevicePath
from slipstream.runtimes.python import TorchRuntime
from slipstream.ship.stability.hardening import INT8
from slipstream.ship.stability.scenes import SPLIT, Scenes, open_scenes, pipeline_for
from slipstream.ship.stability.twins import IdenticalTwins

_DEFAULT = "default"
# Without a test split, one in this many scenes is held back to judge on.
_HELD_BACK = 5


@dataclass(frozen=True)
class Devices:
    """Models by name, the command's own as ""; scenes; and paths between them."""

    models: Mapping[str, Runtime]
    scenes: Scenes
    matrix: DeviceMatrix


@contextlib.contextmanager
def opened(
    model: str,
    data: str | None,
    *,
    paths: str | None = None,
    path: Sequence[str] = (),
    also: Sequence[str] = (),
    techniques: Sequence[str] = (),
    preprocess: str = "",
    arguments: Mapping[str, Any] | None = None,
    scene: int | None = None,
    limit: int | None = None,
    threads: int = 1,
) -> Iterator[Devices]:
    """Open models, scenes and paths; close the models at the end of the block.

    Args:
        model: as for `slipstream.runtimes.load`.
        data: as for `open_scenes`.
        paths: a TOML file of paths, or ``default``; None for the default if nothing else varies.
        path: single paths as specs; ``reference`` for the model's own preprocessing.
        also: other models, as ``NAME=model.tflite``; each adds a path that differs only in it.
        techniques: specs applied to `model`; each variant adds a path, too.
        preprocess: changes to the preprocessing of `pipeline_for`.
        arguments: arguments of the function that builds a workload.
        scene: size of scenes from files, in pixels; None for twice the model's input.
        limit: maximum number of scenes.
    """
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(
            contextlib.closing(runtimes.load(model, threads=threads, arguments=arguments))
        )
        models = {"": first}
        for text in also:
            name, equals, source = text.partition("=")
            if not equals or not name or name in models:
                raise InvalidArgumentError(
                    "also", f"'{text}' is not NAME=MODEL with a new name", remedy="int8=int8.tflite"
                )
            other = runtimes.load(source, threads=threads, arguments=arguments)
            models[name] = stack.enter_context(contextlib.closing(other))
        for text in techniques:
            from slipstream import technique

            variant = runtimes.load(
                model, threads=threads, arguments=arguments, techniques=technique.parse(text)
            )
            models[text] = stack.enter_context(contextlib.closing(variant))
        pipeline = pipeline_for(first, preprocess)
        variants = [name for name in models if name]
        if paths is None and not path and not variants:
            paths = _DEFAULT
        matrix = DeviceMatrix.of(pipeline, {})
        if paths is not None:
            plain = paths == _DEFAULT
            matrix = DeviceMatrix.default(pipeline) if plain else DeviceMatrix.read(paths, pipeline)
        reference = matrix.reference
        extra_paths = [DevicePath.parse(text, reference, text) for text in path]
        if not matrix.paths and not path:
            extra_paths = [DevicePath.parse("", reference, "reference path")]
        extra_paths += [DevicePath(name, reference.pipeline, name) for name in variants]
        side = _side(pipeline)
        yield Devices(
            models,
            open_scenes(data, first, size=scene or 2 * side, limit=limit),
            DeviceMatrix(reference, (*matrix.paths, *extra_paths)),
        )


def _side(pipeline: Any) -> int:
    sizes = [getattr(stage, "height", 0) for stage in pipeline.stages]
    return max(sizes) or 224


@dataclass(frozen=True)
class Work:
    """Arguments of `harden`: a module, training scenes, scenes to judge on, held-out paths."""

    module: Any
    scenes: NDArray[np.uint8]
    labels: NDArray[np.int64]
    judged: tuple[NDArray[np.uint8], NDArray[np.int64]]
    matrix: DeviceMatrix


def hardening(
    model: str,
    data: str | None,
    judge: str | None = None,
    *,
    paths: str | None = None,
    twins: str = "",
    int8: bool = False,
    preprocess: str = "",
    arguments: Mapping[str, Any] | None = None,
    scene: int | None = None,
    limit: int | None = None,
) -> Work:
    """Open the arguments of a fine-tune.

    Args:
        model: ``file.py:function`` that builds a workload.
        data: training scenes, as for `open_scenes`; the training split of a named data set.
        judge: scenes to judge on; None for the test split of a named set, or a fifth of `data`.
        paths: a TOML file of held-out paths; None for `DeviceMatrix.held_out`, or for the plain
            path if scenes are their own twins.
        twins: name of their generator.
        int8: whether to add a path on which an int8 copy of the model answers.
        preprocess, arguments, scene, limit: as for `opened`.
    """
    runtime = runtimes.load(model, arguments=arguments)
    if not isinstance(runtime, TorchRuntime):
        raise InvalidArgumentError(
            "MODEL", f"{model} is not a torch model, so it cannot be trained",
            remedy="pass file.py:function that returns (model, batch)",
        )  # fmt: skip
    pipeline = pipeline_for(runtime, preprocess)
    size = scene or 2 * _side(pipeline)
    trained = open_scenes(data, runtime, size=size, limit=limit, split="train")
    images, labels = trained.array(), trained.labels
    if labels is None:
        raise InvalidArgumentError(
            "data", "the scenes have no labels, but a fine-tune needs them",
            remedy="pass folders of images, one per class, or file.npz with x and y",
        )  # fmt: skip
    if judge is None and data in SPLIT:
        judge = data
    if judge is not None:
        others = open_scenes(judge, runtime, size=size, limit=limit)
        if others.labels is None:
            raise InvalidArgumentError("judge", "the scenes have no labels", remedy="as for --data")
        judged = others.array(), others.labels
    else:
        held_back = np.arange(len(labels)) % _HELD_BACK == 0
        judged = images[held_back], labels[held_back]
        images, labels = images[~held_back], labels[~held_back]
    if paths is not None:
        matrix = DeviceMatrix.read(paths, pipeline)
    elif twins == IdenticalTwins.name:
        matrix = DeviceMatrix.of(pipeline, {"float": "reference"})
    else:
        matrix = DeviceMatrix.held_out(pipeline)
    if int8:
        reference = matrix.reference
        matrix = DeviceMatrix(
            reference, (*matrix.paths, DevicePath(INT8, reference.pipeline, INT8))
        )
    return Work(runtime.module, images, labels, judged, matrix)
