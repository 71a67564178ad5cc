"""Recording a model in the app: what goes in, what every layer gives, how long it takes."""

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
from slipstream.runtimes.taps import Layer, Tap, open_tap
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
        path: of the log.
        level: ``none``; ``io``: statistics of inputs and outputs; ``stats``: and of every layer;
            ``layers``: and all their values; ``full``: and raw inputs. Up to ``stats`` a log has
            sums and histograms only, of which no picture can be made.
        every: record the layers of one frame in so many; the others run as they are deployed.
        model: path or contents of the model's file, where an interpreter does not tell it.
        preprocessing: the pipeline that makes the inputs, if it is known.
        reference: run on plain kernels instead of the optimised ones.
        threads: inside an operator, of the recorded model.

    Raises:
        UnknownNameError: no such level.
        LogError: the file cannot be written.
    """
    if level not in LEVELS:
        raise UnknownNameError("level", level, LEVELS)
    if every < 1:
        raise InvalidArgumentError("every", f"{every} is less than one frame")
    return Recorder(Path(path), level, every, model, preprocessing, reference, threads)


class Recorder:
    """What `record` gives; close it, or use it in a with block.

    Attributes:
        path, level: as given.
        frames: recorded so far.
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
        self._layers: list[Layer] = []
        self._taps: dict[str, int] = {}
        self._pending: list[tuple[str, Array]] = []
        self._there = path.exists()
        if self._rank:
            # A place that cannot be written is told before the work; what is there stays for now.
            path.open("ab").close()

    def run(
        self, session: Any, *inputs: Any, raw: Any = None, key: str | None = None, **readings: Any
    ) -> list[Array]:
        """Run `session` on `inputs` and record it; returns its outputs.

        Args:
            session: what `slipstream.runtimes.taps.open_tap` takes.
            inputs: arrays [N, ...] as the model takes them, or tensors.
            raw: the raw input: a path is written down, of anything else a hash; at level ``full``
                its contents.
            key: how the frame is called; needed where two logs do not hold the same frames.
            readings: anything else that is known: orientation, light, temperature.

        Raises:
            InvalidArgumentError: another model than that of the frames before.
            ModelError: the model fails.
        """
        if self._tap is None or session is not self._session:
            if self._tap is not None and self._writer is not None:
                raise InvalidArgumentError("session", "a log holds one model; begin another log")
            self._session = session
            self._tap = open_tap(
                session, source=self._model, reference=self._reference, threads=self._threads
            )
        arrays = [np.asarray(one) for one in inputs]
        whole = self._rank >= LEVELS.index("stats") and self.frames % self._every == 0
        began = time.perf_counter_ns()
        try:
            outputs, values = self._tap.run(arrays) if whole else (self._tap.plain(arrays), [])
        except SlipstreamError:
            raise
        except Exception as error:
            shapes = ", ".join(str(list(one.shape)) for one in arrays)
            raise ModelError(
                f"the model fails on frame {self.frames + 1}, given {shapes}: {error}",
                remedy="inputs are [N, ...] as the model takes them; what prepares them?",
            ) from error
        latency = time.perf_counter_ns() - began
        if self._rank:
            facts: dict[str, Any] = {"latency_ns": latency, "tapped": whole}
            if outputs and outputs[0].ndim and outputs[0].shape[-1] > 1:
                facts["answer"] = int(np.argmax(outputs[0].reshape(-1)))
            if self.frames % _MEMORY_EVERY == 0:  # asking costs as much as a small model
                facts["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            facts |= {"key": key, "readings": readings or None} | self._raw(raw)
            self._write(arrays, values, outputs, {k: v for k, v in facts.items() if v is not None})
        self.frames += 1
        return outputs

    def tap(self, name: str, value: Any) -> None:
        """Record a tensor of the app under a name, with the frame that runs next."""
        if self._rank:
            self._pending.append((name, np.asarray(value)))

    def close(self) -> None:
        """Write the end of the log.

        Raises:
            LogError: it could not be written.
        """
        if self._writer is not None:
            self._writer.close()
        elif self._rank and not self._there:
            self.path.unlink(missing_ok=True)  # not one frame was recorded

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
        kept = [self._keep(number, tensors[number]) for number in numbers]
        statistics[numbers] = measured(kept)
        self._writer.statistics(self.frames, 0, statistics)
        for name, value in self._pending:
            if name not in self._taps:
                self._taps[name] = len(self._layers)
                self._layers.append(Layer(name, "tap", value.shape))
                self._writer.declare(self._taps[name], self._layers[-1])
            number = self._taps[name]
            self._writer.statistics(self.frames, number, measured([self._keep(number, value)]))
        self._pending.clear()
        self._writer.frame(self.frames, facts)

    def _keep(self, number: int, value: Any) -> Array:
        """The tensor in the order of logs; written itself, where the level says so."""
        layer = self._layers[number]
        # Inputs as the model takes them: that they are codes, and which, is what may be wrong.
        real = value if layer.kind == "input" else layer.real(value)
        if self._rank >= LEVELS.index("layers"):
            assert self._writer is not None
            self._writer.tensor(self.frames, number, real)
        return canonical(real, layer.channels_last)

    def _begin(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> LogWriter:
        assert self._tap is not None
        tap = self._tap
        given = [
            Layer(f"input_{n}", "input", (None, *one.shape[1:])) for n, one in enumerate(inputs)
        ]
        gives = [Layer(f"output_{n}", "output", one.shape) for n, one in enumerate(outputs)]
        self._layers = [*(tap.inputs or given), *tap.layers, *(tap.outputs or gives)]
        environment = capture(torch=False)
        header = {
            "runtime": tap.runtime, "model": tap.model_hash, "level": self.level,
            "every": self._every, "reference": self._reference,
            "tensors": [asdict(one) for one in self._layers],
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
