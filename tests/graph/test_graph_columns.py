"""Tables of columns are read off annotations, as older and newer versions of numpy spell them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipstream.graph.values import Columns

Item = TypeVar("Item")


class Alias(Generic[Item]):
    """As ``NDArray`` is from numpy 2.5 and Python 3.12 on: of one argument."""


@dataclass(frozen=True, eq=False)
class Spelled(Columns):
    array: NDArray[np.int32]
    alias: Alias[np.float64]


def test_a_columns_dtype_is_that_of_its_annotation() -> None:
    assert Spelled.dtypes == {"array": np.int32, "alias": np.float64}
