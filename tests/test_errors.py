"""Errors have what, where and remedy, and survive copying and pickling."""

from __future__ import annotations

import copy
import pickle

import pytest

from slipstream import errors
from slipstream.errors import (
    InvalidArgumentError,
    MeasurementError,
    MissingExtraError,
    SlipstreamError,
    UnknownNameError,
)


def test_the_three_parts_are_on_separate_lines() -> None:
    error = SlipstreamError("it broke", where="a.py:3", remedy="fix it")
    assert str(error) == "it broke\n  where: a.py:3\n  try: fix it"
    assert str(SlipstreamError("it broke")) == "it broke"


def test_usage_errors_exit_with_2_and_others_with_1() -> None:
    assert InvalidArgumentError("x", "is wrong").exit_code == 2
    assert UnknownNameError("arm", "x", []).exit_code == 2
    assert MeasurementError("x").exit_code == 1


def test_built_in_exception_classes_catch_them() -> None:
    assert issubclass(InvalidArgumentError, ValueError)
    assert issubclass(UnknownNameError, LookupError)


def test_a_mistyped_name_gets_a_suggestion() -> None:
    error = UnknownNameError("technique", "lowrnk", ["lowrank", "amp", "powersgd"])
    assert error.remedy == "did you mean lowrank?"


def test_an_unknown_name_lists_the_known_ones_but_not_hundreds() -> None:
    assert UnknownNameError("arm", "zzz", ["b", "a"]).remedy == "known: a, b"
    some = UnknownNameError("arm", "zzz", [f"name{n:03}" for n in range(30)]).remedy or ""
    assert some.endswith("name029"), "the requested one may be the last"
    many = UnknownNameError("arm", "zzz", [f"name{n:03}" for n in range(300)]).remedy
    assert many is not None
    assert len(many) < 200
    assert many.endswith("and 288 more")
    assert UnknownNameError("arm", "zzz", []).remedy is None


def test_a_measurement_error_names_arm_block_and_phase() -> None:
    error = MeasurementError("it raised", arm="fast", block=7, phase="measure", where="a.py:3")
    assert error.where == "arm fast, block 7, phase measure, a.py:3"


def test_a_missing_extra_names_what_to_install() -> None:
    error = MissingExtraError("Parquet export", "pyarrow", "parquet")
    assert "pip install 'slipstream[parquet]'" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        SlipstreamError("it broke", where="a.py:3", remedy="fix it"),
        InvalidArgumentError("budget", "is negative", remedy="as 60s"),
        UnknownNameError("arm", "x", ["y"]),
        MissingExtraError("Parquet export", "pyarrow", "parquet"),
        MeasurementError("it raised", arm="fast", block=7, phase="measure"),
        errors.StoreError("full", where="r.db"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_copy_is_the_same_error(error: SlipstreamError, again) -> None:
    twin = again(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)
