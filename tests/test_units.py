"""Quantities are parsed as they were formatted, and nothing else is accepted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import InvalidArgumentError
from slipstream.units import (
    format_bytes,
    format_detectable,
    format_duration,
    format_percent,
    format_ratio,
    format_reach,
    format_speedup,
    inverse_interval,
    parse_bandwidth,
    parse_bytes,
    parse_duration_ns,
    with_article,
)

# Three significant digits: half a unit of the third digit, relative to the smallest three-digit
# number.
_ROUNDING = 0.5 / 100


@given(st.floats(1e-2, 1e18))
def test_a_formatted_duration_parses_back_within_its_digits(nanoseconds: float) -> None:
    again = parse_duration_ns(format_duration(nanoseconds))
    assert again == pytest.approx(nanoseconds, rel=1.01 * _ROUNDING)


@given(st.integers(0, 2**49))
def test_a_formatted_size_parses_back_within_its_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=1.01 * _ROUNDING, abs=0.5)


@given(st.floats(1e-2, 3e16))
def test_a_formatted_duration_is_short(nanoseconds: float) -> None:
    number, unit = format_duration(nanoseconds).split(" ")
    assert len(number.replace(".", "").lstrip("0")) <= 4
    assert unit in {"ns", "\u00b5s", "ms", "s", "min", "h"}


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("60", 60e9),
        ("60s", 60e9),
        ("2 min", 120e9),
        ("1.5h", 5400e9),
        (" 10ms ", 10e6),
        ("3us", 3e3),
        ("3\u00b5s", 3e3),
        ("3\u03bcs", 3e3),
        ("1e-3s", 1e6),
        (".5s", 5e8),
        ("0s", 0.0),
    ],
)
def test_formats_durations(text: str, nanoseconds: float) -> None:
    assert parse_duration_ns(text) == pytest.approx(nanoseconds)


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 << 30), ("100MB", 100_000_000), ("5", 5), ("1 kib", 1024), ("0.5KiB", 512)],
)
def test_formats_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("1gbit", 125e6), ("1gbit/s", 125e6), ("12.5GB", 12.5e9), (" 100 MB/s ", 100e6)],
)
def test_formats_bandwidths(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("parse", [parse_duration_ns, parse_bytes, parse_bandwidth])
@pytest.mark.parametrize(
    "text",
    ["", "fast", "ms", "-1s", "-1GB", "1e999", "1e308TB", "1e308h", "1 parsec", "nan", "1s2"],
)
def test_an_invalid_quantity_is_refused_by_the_name_of_its_argument(parse, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse(text, "budget")
    assert caught.value.argument == "budget"
    assert caught.value.remedy is not None


def test_zero_bandwidth_is_not_a_bandwidth() -> None:
    with pytest.raises(InvalidArgumentError):
        parse_bandwidth("0gbit")


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0 ns"),
        (999.6, "1.00 µs"),
        (12_345, "12.3 µs"),
        (999_960_000, "1.00 s"),
        (90e9, "90.0 s"),
        (150e9, "2.50 min"),
        (-12e6, "-12.0 ms"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_formats_durations_for_people(nanoseconds: float, text: str) -> None:
    assert format_duration(nanoseconds) == text


def test_other_formats() -> None:
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(17) == "17 B"
    assert format_ratio(1.3125) == "1.312x"
    assert format_ratio(12.34) == "12.3x"
    assert format_percent(0.0312) == "3.1 %"
    assert format_percent(0.0312, signed=True) == "+3.1 %"
    assert format_percent(math.inf) == format_ratio(math.nan) == format_bytes(math.nan) == "-"


@pytest.mark.parametrize(
    ("middle", "low", "high", "text"),
    [
        (1.39, 1.32, 1.46, "[1.32, 1.46]"),
        (3.457, 0.0, math.inf, "[–, –]"),
        (0.06, 0.001, 0.1, "[–, 0.10]"),
        (50.0, 48.0, 52.0, "[48.00, 52.00]"),
        (math.nan, 0.5, 2.0, "[–, –]"),
    ],
)
def test_a_meaningless_bound_is_a_dash(middle: float, low: float, high: float, text: str) -> None:
    assert format_reach(middle, low, high) == text


def test_a_ratio_of_times_is_inverted_with_its_interval() -> None:
    assert inverse_interval(0.8, 0.5, 1.0) == (1.25, 1.0, 2.0)
    assert inverse_interval(0.5, 0.0, math.inf) == (2.0, 0.0, math.inf)
    assert format_speedup(inverse_interval(0.8, 0.5, 1.0)) == "1.25x [1.00, 2.00]"
    assert format_speedup((1.25, 1.0, 2.0), 3) == "1.250x [1.000, 2.000]"
    assert format_speedup((math.nan, 0.0, math.inf)) == "-"


def test_a_meaningless_difference_is_a_dash() -> None:
    assert format_detectable(0.012) == "±1.2 %"
    assert format_detectable(math.expm1(700.0)) == format_detectable(math.nan) == "–"


def test_chooses_articles() -> None:
    names = ("int", "str", "Adam", "UNet", "SGD", "LSTM", "Linear", "GRU", "")
    assert " ".join(with_article(name) for name in names) == (
        "an int a str an Adam a UNet an SGD an LSTM a Linear a GRU a "
    )
