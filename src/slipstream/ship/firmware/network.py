"""A network as a device sees it: tensors of fixed shape, operators in the order they run in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Padding = str  # "same" or "valid"
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Quantization:
    """real = scale * (code - zero_point), for a whole tensor or for each index along `axis`.

    Attributes:
        scales: float32 [1] or [size of axis].
        zero_points: int64, as many.
        axis: which dimension they belong to; of no meaning with one scale.
    """

    scales: Array
    zero_points: Array
    axis: int = 0

    @property
    def scale(self) -> np.float32:
        """The first scale; the only one of an activation."""
        return np.float32(self.scales[0])

    @property
    def zero_point(self) -> int:
        """The first zero point; the only one of an activation."""
        return int(self.zero_points[0])


@dataclass(frozen=True)
class Tensor:
    """What an operator reads or writes.

    Attributes:
        shape: of positive sizes; images are NHWC.
        dtype: the name numpy has for it, as ``int8``.
        data: of constants; None for what is computed.
        variable: it keeps its value from one inference to the next.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    quantization: Quantization | None = None
    data: Array | None = None
    variable: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.size * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Operator:
    """One step of a network.

    Attributes:
        kind: the builtin operator's name in lower case, as ``conv_2d``.
        inputs: indices of tensors; -1 where an optional one is left out.
        options: those of its kind, by the names of the format's schema.
        source: the module it was made from; empty where that is not known.
    """

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Network:
    """Tensors and operators; inputs and outputs are indices of tensors."""

    name: str
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def where(self, index: int) -> str:
        """The operator, as errors name it."""
        one = self.operators[index]
        names = [self.tensors[at].name for at in (*one.inputs, *one.outputs[:1]) if at >= 0]
        # Weights of ours are named after the module that has them.
        modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
        source = one.source or next(iter([*modules, *names[-1:]]), "")
        return f"operator {index}, {one.kind.upper()}" + (f", '{source}'" if source else "")
