"""What every runtime looks like: inputs and outputs described, batches run, closed."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import SlipstreamError

Array = NDArray[Any]


class ModelError(SlipstreamError):
    """A model cannot be loaded, or does not answer as it says."""


class OverloadedError(ModelError):
    """A server refused a batch because it has too much to do; it may take the next one."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that goes into a model or comes out of it.

    Attributes:
        name: the model's own name of it.
        dtype: NumPy's name: ``"float32"``, ``"int8"``.
        shape: of a batch, samples first; None where any number may stand.
        scale, zero_point: of a quantised tensor, real = scale * (code - zero_point); scale 0 where
            numbers stand for themselves.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    scale: float = 0.0
    zero_point: int = 0

    def __str__(self) -> str:
        shape = ", ".join("N" if size is None else str(size) for size in self.shape)
        codes = f", {self.scale:g} * (code - {self.zero_point})" if self.scale else ""
        return f"{self.name} {self.dtype}[{shape}]{codes}"


class Runtime(ABC):
    """A loaded model.

    Attributes:
        kind: ``torch``, ``onnx``, ``litert``, ``http`` or ``callable``.
        name: of the model, short.
        inputs, outputs: what it takes and gives, in order; empty where it does not say.
        fixed_batch: samples it takes at a time, neither more nor fewer; None for any number.
        concurrent: whether `run` may be called from several threads at once, with a gain.
    """

    kind = ""
    concurrent = False

    def __init__(
        self,
        name: str,
        inputs: Sequence[TensorSpec] = (),
        outputs: Sequence[TensorSpec] = (),
        fixed_batch: int | None = None,
    ) -> None:
        self.name = name
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.fixed_batch = fixed_batch

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Outputs [N, ...] of inputs [N, ...], for any N of 1 or more.

        A model of a fixed batch is called as often as it takes, the last time with the last sample
        repeated.

        Raises:
            ModelError: it failed, or gave another number of samples than it took.
            OverloadedError: a server refused.
        """
        fixed = self.fixed_batch
        count = len(inputs[0])
        if fixed is None or count == fixed:
            outputs = self._run(inputs)
            for output in outputs:
                if not output.ndim or len(output) != count:
                    self._refuse(output, count)
            return outputs
        parts = []
        for first in range(0, count, fixed):
            part = [array[first : first + fixed] for array in inputs]
            lacking = fixed - len(part[0])
            if lacking:
                part = [np.concatenate([a, np.repeat(a[-1:], lacking, 0)]) for a in part]
            outputs = self._run(part)
            for output in outputs:
                if not output.ndim or len(output) != fixed:
                    self._refuse(output, fixed)
            parts.append(outputs)
        return [np.concatenate(outputs)[:count] for outputs in zip(*parts, strict=True)]

    @abstractmethod
    def _run(self, inputs: Sequence[Array]) -> list[Array]:
        """One call of the model."""

    def close(self) -> None:  # noqa: B027 - many runtimes hold nothing
        """Give back what loading took; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _refuse(self, output: Array, count: int) -> NoReturn:
        given = len(output) if output.ndim else "no"
        raise ModelError(
            f"{self.name} was given {count} samples and answered {given}",
            remedy="a model answers every sample of a batch once, in their order",
        )


@contextlib.contextmanager
def loading(path: str, library: str) -> Iterator[None]:
    """Turn whatever a runtime's own library raises while it loads `path` into a `ModelError`."""
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise ModelError(
            f"{library} cannot load it: {lines[0] if lines else type(error).__name__}", where=path
        ) from error
