"""Record a model in the app: inputs, outputs of every layer, latency."""

from __future__ import annotations

import hashlib
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from slipstream.errors import InvalidArgumentError, SlipstreamError, UnknownNameError
from slipstream.measure.environment import capture
from slipstream.runtimes import ModelError
from slipstream.runtimes.preprocessing import Pipeline
from slipstream.runtimes.taps import Tap, TappedTensor, open_tap
from slipstream.ship.xray.log import LogWriter
from slipstream.ship.xray.statistics import STATISTICS, Array, canonical, measured

Level = Literal["none", "io", "stats", "layers", "full"]
_MEMORY_EVERY = 64
LEVELS: tuple[Level, ...] = ("none", "io", "stats", "layers", "full")


def record(
    path: Path | str,
    level: Level = "stats",
    *,
    every: int = 1,
    model: Any = None,
    preprocessing: Pipeline | None = None,
    reference: bool = False,
    threads: int = 1,
) -> Recorder:
    """Begin a log of a deployed model.

        with xray.record("edge.xr") as rec:
            for image in frames:
                (scores,) = rec.run(session, preprocess(image), raw=image)

    Args:
        path: file to write.
        level: ``none``; ``io``: statistics of inputs and outputs; ``stats``: also of every layer;
            ``layers``: also all their values; ``full``: also raw inputs. Up to ``stats``, a log
            holds only sums and histograms, from which no image can be reconstructed.
        every: record layers in one of this many frames; others run as deployed.
        model: path or contents of the model's file, if the interpreter does not provide it.
        preprocessing: the pipeline that makes the inputs, if available.
        reference: whether to run reference kernels instead of optimized ones.
        threads: number of threads within an operator.

    Raises:
        UnknownNameError: the level does not exist.
        LogError: the file cannot be written.
    """
    if level not in LEVELS:
        raise UnknownNameError("level", level, LEVELS)
    if every < 1:
        raise InvalidArgumentError("every", f"{every} is not a positive number of frames")
    return Recorder(Path(path), level, every, model, preprocessing, reference, threads)


class Recorder:
    """A log being recorded; close it, or use it in a with block.

    Attributes:
        path, level: arguments of `record`.
        frames: number of frames recorded.
    """

    def __init__(
        self, path: Path, level: Level, every: int, model: Any, preprocessing: Pipeline | None,
        reference: bool, threads: int,
    ) -> None:  # fmt: skip
        self.path, self.level, self.frames = path, level, 0
        self._every, self._model, self._preprocessing = every, model, preprocessing
        self._reference, self._threads = reference, threads
        self._rank = LEVELS.index(level)
        self._tap: Tap | None = None
        self._session: Any = None
        self._writer: LogWriter | None = None
        self._layers: list[TappedTensor] = []
        self._taps: dict[str, int] = {}
        self._pending: list[tuple[str, Array]] = []
        self._existed = path.exists()
        if self._rank:
            # Fail early if the path cannot be written, without truncating an existing file.
            path.open("ab").close()

    def run(
        self, session: Any, *inputs: Any, raw: Any = None, key: str | None = None, **readings: Any
    ) -> list[Array]:
        """Run `session` on `inputs`, record it, and return its outputs.

        Args:
            session: as for `slipstream.runtimes.taps.open_tap`.
            inputs: arrays or tensors [N, ...] as the model takes them.
            raw: the raw input: paths are stored, of anything else a hash; at level ``full`` its
                contents.
            key: name of the frame, required to compare logs of different frames.
            readings: other measurements: orientation, light, temperature.

        Raises:
            InvalidArgumentError: the model is not that of earlier frames.
            ModelError: the model fails.
        """
        if self._tap is None or session is not self._session:
            if self._tap is not None and self._writer is not None:
                raise InvalidArgumentError(
                    "session", "a log holds one model", remedy="record another log"
                )
            self._session = session
            self._tap = open_tap(
                session, source=self._model, reference=self._reference, threads=self._threads
            )
        arrays = [np.asarray(tensor) for tensor in inputs]
        tapped = self._rank >= LEVELS.index("stats") and self.frames % self._every == 0
        began = time.perf_counter_ns()
        try:
            outputs, values = self._tap.run(arrays) if tapped else (self._tap.plain(arrays), [])
        except SlipstreamError:
            raise
        except Exception as error:
            shapes = ", ".join(str(list(array.shape)) for array in arrays)
            raise ModelError(
                f"the model failed on frame {self.frames + 1}, given {shapes}: {error}",
                remedy="check the preprocessing: inputs are [N, ...] as the model takes them",
            ) from error
        latency = time.perf_counter_ns() - began
        if self._rank:
            facts: dict[str, Any] = {"latency_ns": latency, "tapped": tapped}
            if outputs and outputs[0].ndim and outputs[0].shape[-1] > 1:
                facts["answer"] = int(np.argmax(outputs[0].reshape(-1)))
            if self.frames % _MEMORY_EVERY == 0:  # getrusage costs as much as a small model
                facts["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            facts |= {"key": key, "readings": readings or None} | self._raw(raw)
            self._write(arrays, values, outputs, {k: v for k, v in facts.items() if v is not None})
        self.frames += 1
        return outputs

    def tap(self, name: str, value: Any) -> None:
        """Record a tensor of the app under a name, with the next frame."""
        if self._rank:
            self._pending.append((name, np.asarray(value)))

    def close(self) -> None:
        """Write the end of the log.

        Raises:
            LogError: a write failed.
        """
        if self._writer is not None:
            self._writer.close()
        elif self._rank and not self._existed:
            self.path.unlink(missing_ok=True)  # no frame was recorded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(
        self, inputs: Sequence[Array], values: Sequence[Array | None], outputs: Sequence[Array],
        facts: Mapping[str, Any],
    ) -> None:  # fmt: skip
        assert self._tap is not None
        if self._writer is None:
            self._writer = self._begin(inputs, outputs)
        tensors = [*inputs, *(values or [None] * len(self._tap.layers)), *outputs]
        numbers = [number for number, value in enumerate(tensors) if value is not None]
        statistics = np.zeros(len(tensors), STATISTICS)
        ordered = [self._stored(number, tensors[number]) for number in numbers]
        statistics[numbers] = measured(ordered)
        self._writer.statistics(self.frames, 0, statistics)
        for name, value in self._pending:
            if name not in self._taps:
                self._taps[name] = len(self._layers)
                self._layers.append(TappedTensor(name, "tap", value.shape))
                self._writer.declare(self._taps[name], self._layers[-1])
            number = self._taps[name]
            self._writer.statistics(self.frames, number, measured([self._stored(number, value)]))
        self._pending.clear()
        self._writer.frame(self.frames, facts)

    def _stored(self, number: int, value: Any) -> Array:
        """Return the tensor in canonical order, after writing it if the level requires."""
        layer = self._layers[number]
        # Inputs stay as the model takes them: their codes may be what is wrong.
        real = value if layer.kind == "input" else layer.real(value)
        if self._rank >= LEVELS.index("layers"):
            assert self._writer is not None
            self._writer.tensor(self.frames, number, real)
        return canonical(real, layer.channels_last)

    def _begin(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> LogWriter:
        assert self._tap is not None
        tap = self._tap
        fed = [
            TappedTensor(f"input_{n}", "input", (None, *array.shape[1:]))
            for n, array in enumerate(inputs)
        ]
        results = [
            TappedTensor(f"output_{n}", "output", array.shape) for n, array in enumerate(outputs)
        ]
        self._layers = [*(tap.inputs or fed), *tap.layers, *(tap.outputs or results)]
        environment = capture(torch=False)
        header = {
            "runtime": tap.runtime, "model": tap.model_hash, "level": self.level,
            "every": self._every, "reference": self._reference,
            "tensors": [asdict(layer) for layer in self._layers],
            "preprocessing": self._preprocessing and self._preprocessing.to_dict(),
            "preprocessing_hash": self._preprocessing and self._preprocessing.hash,
            "processor": environment.facts.get("processor"), "began": time.time(),
        }  # fmt: skip
        return LogWriter(self.path, header, self._rank >= LEVELS.index("layers"))

    def _raw(self, raw: Any) -> dict[str, Any]:
        if raw is None:
            return {}
        if isinstance(raw, (str, Path)):
            if len(str(raw)) < 4096 and Path(raw).is_file():
                return {"raw": str(raw)}
            raw = str(raw).encode()
        content = raw if isinstance(raw, bytes) else np.asarray(raw).tobytes()
        facts: dict[str, Any] = {"raw_hash": hashlib.sha256(content).hexdigest()[:16]}
        if self.level == "full":
            facts["raw_bytes"] = content.hex()
            if isinstance(raw, np.ndarray):
                facts["raw_array"] = [raw.dtype.str, list(raw.shape)]
        return facts
