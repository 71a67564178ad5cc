"""Networks: tensors of fixed shape and operators in execution order."""

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
    """Affine quantization, real = scale * (code - zero_point), per tensor or along `axis`.

    Attributes:
        scales: float32 [1] or [size of axis].
        zero_points: int64, of the same shape.
        axis: dimension of the scales; unused with one scale.
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
    """Input or output of an operator.

    Attributes:
        shape: positive sizes; images are NHWC.
        dtype: NumPy's name, such as ``int8``.
        data: values of a constant; None for computed tensors.
        variable: whether it keeps its value between inferences.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    quantization: Quantization | None = None
    data: Array | None = None
    variable: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Operator:
    """One operator of a network.

    Attributes:
        kind: name of the builtin operator in lower case, such as ``conv_2d``.
        inputs: indices of tensors; -1 for omitted optional ones.
        options: by their names in the format's schema.
        source: name of the module it was exported from; empty if unknown.
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
        """Return the name of an operator for errors."""
        operator = self.operators[index]
        names = [
            self.tensors[at].name for at in (*operator.inputs, *operator.outputs[:1]) if at >= 0
        ]
        # Exported weights are named after their module.
        modules = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
        source = operator.source or next(iter([*modules, *names[-1:]]), "")
        return f"operator {index}, {operator.kind.upper()}" + (f", '{source}'" if source else "")
