"""The interface of runtimes."""

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
    """A model cannot be loaded, or fails or misbehaves."""


class OverloadedError(ModelError):
    """A server refused a batch because it is overloaded; it may accept the next one."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model.

    Attributes:
        name: the model's name of the tensor.
        dtype: NumPy's name of the type: ``"float32"``, ``"int8"``.
        shape: shape of a batch, samples first; None for any size.
        scale, zero_point: quantization, real = scale * (code - zero_point); scale 0 if the tensor
            is not quantized.
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
        name: short name of the model.
        inputs, outputs: specifications in order; empty if unknown.
        fixed_batch: required number of samples per call; None for any number.
        concurrent: whether several threads that call `run` simultaneously increase throughput.
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
        """Return outputs [N, ...] of inputs [N, ...], for any N of 1 or more.

        A model with a fixed batch is called repeatedly; the last batch repeats the last sample.

        Raises:
            ModelError: the model failed, or returned a different number of samples.
            OverloadedError: a server refused the batch.
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
            missing = fixed - len(part[0])
            if missing:
                part = [np.concatenate([a, np.repeat(a[-1:], missing, 0)]) for a in part]
            outputs = self._run(part)
            for output in outputs:
                if not output.ndim or len(output) != fixed:
                    self._refuse(output, fixed)
            parts.append(outputs)
        return [np.concatenate(outputs)[:count] for outputs in zip(*parts, strict=True)]

    @abstractmethod
    def _run(self, inputs: Sequence[Array]) -> list[Array]:
        """Call the model once."""

    def close(self) -> None:  # noqa: B027 - many runtimes hold nothing
        """Release resources; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _refuse(self, output: Array, count: int) -> NoReturn:
        answered = len(output) if output.ndim else "no"
        raise ModelError(
            f"{self.name} was given {count} samples and answered {answered}",
            remedy="a model must answer every sample of a batch once, in order",
        )


@contextlib.contextmanager
def loading(path: str, library: str) -> Iterator[None]:
    """Convert exceptions of a runtime's library during loading to `ModelError`."""
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise ModelError(
            f"{library} cannot load the model: {lines[0] if lines else type(error).__name__}",
            where=path,
        ) from error
