"""Column tables are derived from annotations, as written by old and new versions of numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipstream.graph.values import Columns

Item = TypeVar("Item")


class Alias(Generic[Item]):
    """Like ``NDArray`` from numpy 2.5 and Python 3.12 on, with one argument."""


@dataclass(frozen=True, eq=False)
class Spelled(Columns):
    array: NDArray[np.int32]
    alias: Alias[np.float64]


def test_the_dtype_of_a_column_is_that_of_its_annotation() -> None:
    assert Spelled.dtypes == {"array": np.int32, "alias": np.float64}
