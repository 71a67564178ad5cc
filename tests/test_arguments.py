"""Integers of any type are accepted, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError


@pytest.mark.parametrize("value", [3, np.int32(3), np.uint64(3)])
def test_integers_of_any_type_become_ints(value: Any) -> None:
    assert type(as_integer("rows", value)) is int
    assert as_integer("rows", value) == 3
    assert as_integer("rows", -3, None) == -3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1e6, r"rows: 1000000\.0 is not an integer"),
        ("3", "rows: '3' is not"),
        (None, "rows: None"),
        (True, "rows: True"),
        (0, "rows: 0 is less than 1"),
    ],
)
def test_other_values_are_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        as_integer("rows", value)
