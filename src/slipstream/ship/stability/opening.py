"""What a command names, opened: models, scenes, and the paths between them."""

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
from slipstream.ship.stability.twins import Same

_DEFAULT = "default"
# Of scenes without a part to judge on, every so many-th.
_HELD_BACK = 5


@dataclass(frozen=True)
class Devices:
    """Models by name, the first with an empty one; scenes; and a matrix of paths.

    Attributes:
        models: what runs: the model, other runtimes of it, variants with techniques.
        matrix: of paths, whose reference is the first model's own preprocessing.
    """

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
    """Open it, and close the models when the block ends.

    Args:
        model: as `slipstream.runtimes.load` takes it.
        data: as `open_scenes` takes it.
        paths: a TOML file of paths, or ``default``; None for the default where nothing else varies.
        path: single paths, in the grammar; ``reference`` for the model's own preprocessing.
        also: other models, as ``NAME=model.tflite``; each adds a path that differs in it alone.
        techniques: applied to `model`, each a variant that adds a path, too.
        preprocess: what the model's own preprocessing does otherwise than `pipeline_for` says.
        arguments: of the function that builds a workload.
        scene: pixels of scenes from files; None for twice the model's input.
        limit: of scenes.

    Raises:
        SlipstreamError: something of it cannot be opened.
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
    """What `harden` takes: a module, scenes to train on, others to judge on, held-out paths."""

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
    """Open what a fine-tune takes.

    Args:
        model: ``file.py:function`` that builds a workload.
        data: to train on, as `open_scenes` takes it; of a named set its training part.
        judge: to judge on; None for the test part of a named set, else a fifth of `data`.
        paths: held out: a TOML file; None for `DeviceMatrix.held_out`, or for the plain path where
            scenes are their own twins.
        twins: name of their generator.
        int8: add a path on which an int8 copy of the model answers.
        preprocess, arguments, scene, limit: as `opened` takes them.

    Raises:
        InvalidArgumentError: no torch model, or scenes without labels.
        SlipstreamError: something of it cannot be opened.
    """
    runtime = runtimes.load(model, arguments=arguments)
    if not isinstance(runtime, TorchRuntime):
        raise InvalidArgumentError(
            "MODEL", f"{model} is no torch model, and only these can be trained",
            remedy="file.py:function that returns (model, batch)",
        )  # fmt: skip
    pipeline = pipeline_for(runtime, preprocess)
    size = scene or 2 * _side(pipeline)
    trained = open_scenes(data, runtime, size=size, limit=limit, split="train")
    pictures, labels = trained.array(), trained.labels
    if labels is None:
        raise InvalidArgumentError(
            "data", "the scenes have no labels, and a fine-tune needs them",
            remedy="folders of pictures, one a class; or file.npz with x and y",
        )  # fmt: skip
    if judge is None and data in SPLIT:
        judge = data
    if judge is not None:
        others = open_scenes(judge, runtime, size=size, limit=limit)
        if others.labels is None:
            raise InvalidArgumentError("judge", "the scenes have no labels")
        judged = others.array(), others.labels
    else:
        back = np.arange(len(labels)) % _HELD_BACK == 0
        judged = pictures[back], labels[back]
        pictures, labels = pictures[~back], labels[~back]
    if paths is not None:
        matrix = DeviceMatrix.read(paths, pipeline)
    elif twins == Same.name:
        matrix = DeviceMatrix.of(pipeline, {"float": "reference"})
    else:
        matrix = DeviceMatrix.held_out(pipeline)
    if int8:
        reference = matrix.reference
        matrix = DeviceMatrix(
            reference, (*matrix.paths, DevicePath(INT8, reference.pipeline, INT8))
        )
    return Work(runtime.module, pictures, labels, judged, matrix)
