"""Parsing and formatting of quantities; internally in nanoseconds, bytes and bytes/s."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from slipstream.errors import InvalidArgumentError

# Both the micro sign (U+00B5) of most keyboards and the Greek mu (U+03BC).
_TIME_NS = {
    "ns": 1.0,
    "us": 1e3,
    "\u00b5s": 1e3,
    "\u03bcs": 1e3,
    "ms": 1e6,
    "s": 1e9,
    "min": 60e9,
    "h": 3600e9,
}
_BYTES = {
    "b": 1.0,
    # Without a "b" as in data sheets, linker scripts and `docker --memory`.
    "k": 2.0**10,
    "m": 2.0**20,
    "g": 2.0**30,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2.0**10,
    "mib": 2.0**20,
    "gib": 2.0**30,
    "tib": 2.0**40,
}
_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
# Ends of intervals beyond this relative difference (1000 %) are not shown.
_MAX_DIFFERENCE = 10.0
_NOTHING = "–"
_QUANTITY = re.compile(
    r"\s*([+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z\u00b5\u03bc]*)\s*"
)


def _scaled(value: float, factor: float | None) -> float | None:
    """Return `value` in the base unit; None for an unknown unit or an overflow."""
    if factor is None or not math.isfinite(value * factor):
        return None
    return value * factor


def _split(text: str, argument: str, example: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None or not math.isfinite(float(match[1])):
        raise InvalidArgumentError(
            argument, f"'{text}' is not a quantity", remedy=f"for example {example}"
        )
    return float(match[1]), match[2]


def parse_duration_ns(text: str, argument: str = "duration") -> float:
    """Parse a duration such as ``"60s"``, ``"10ms"`` or ``"2min"`` to ns; seconds without a unit.

    Raises:
        InvalidArgumentError: not a number, an unknown unit, or negative.
    """
    value, unit = _split(text, argument, "60s, 10ms, 2min")
    nanoseconds = _scaled(value, _TIME_NS.get(unit or "s"))
    if nanoseconds is None or value < 0:
        raise InvalidArgumentError(
            argument, f"'{text}' is not a duration", remedy="for example 60s, 10ms, 2min"
        )
    return nanoseconds


def parse_bytes(text: str, argument: str = "size") -> int:
    """Parse a size such as ``"8GiB"``, ``"100MB"`` or ``"30k"`` (KiB); bytes without a unit.

    Raises:
        InvalidArgumentError: not a number, an unknown unit, or negative.
    """
    value, unit = _split(text, argument, "8GiB, 100MB")
    size = _scaled(value, _BYTES.get((unit or "b").lower()))
    if size is None or value < 0:
        raise InvalidArgumentError(
            argument, f"'{text}' is not a size", remedy="for example 8GiB, 100MB"
        )
    return round(size)


def parse_bandwidth(text: str, argument: str = "bandwidth") -> float:
    """Parse a bandwidth such as ``"1gbit"`` or ``"12.5GB"`` (per second) to bytes/s.

    Raises:
        InvalidArgumentError: not a number, an unknown unit, or not positive.
    """
    value, unit = _split(text.strip().removesuffix("/s"), argument, "1gbit, 12.5GB")
    lower = unit.lower()
    factor = _BITS_PER_S[lower] / 8 if lower in _BITS_PER_S else _BYTES.get(lower)
    rate = _scaled(value, factor)
    if rate is None or value <= 0:
        raise InvalidArgumentError(
            argument, f"'{text}' is not a bandwidth", remedy="for example 1gbit, 12.5GB"
        )
    return rate


def format_duration(nanoseconds: float) -> str:
    """Format with three significant digits and a suitable unit: ``"12.3 ms"``."""
    if not math.isfinite(nanoseconds):
        return "-"
    size = abs(nanoseconds)
    for unit in ("h", "min", "s", "ms", "\u00b5s"):
        # Minutes and hours from two on: "90 s" reads better than "1.5 min".
        threshold = _TIME_NS[unit] * (2 if unit in ("h", "min") else 1)
        # 0.9995: "1.00 ms" instead of the rounded "1000 µs".
        if size >= threshold * 0.9995:
            return f"{_significant(nanoseconds / _TIME_NS[unit])} {unit}"
    return f"{_significant(nanoseconds)} ns"


def format_bytes(count: float) -> str:
    """Format with three significant digits in binary units: ``"1.50 GiB"``."""
    if not math.isfinite(count):
        return "-"
    size = abs(count)
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor * 0.9995:
            return f"{_significant(count / factor)} {unit}"
    return f"{count:.0f} B"


def format_ratio(ratio: float) -> str:
    """Format a speed-up or size ratio: ``"1.31x"``."""
    if not math.isfinite(ratio):
        return "-"
    return f"{ratio:.3f}x" if abs(ratio) < 2 else f"{_significant(ratio)}x"


def format_percent(fraction: float, *, signed: bool = False) -> str:
    """Format ``0.0312`` as ``"3.1 %"``."""
    if not math.isfinite(fraction):
        return "-"
    return f"{100 * fraction:{'+' if signed else ''}.1f} %"


def format_reach(
    middle: float, low: float, high: float, as_text: Callable[[float], str] = "{:.2f}".format
) -> str:
    """Format the interval of a ratio: ``"[1.32, 1.46]"``.

    An end that is not finite, or differs from the middle by more than a factor of 11, is a dash.
    """
    most = 1 + _MAX_DIFFERENCE
    ends = [
        as_text(end) if middle / most <= end <= middle * most else _NOTHING for end in (low, high)
    ]
    return f"[{', '.join(ends)}]"


def format_speedup(speedup: tuple[float, float, float], digits: int = 2) -> str:
    """Format a speed-up (estimate, low, high): ``"1.22x [1.18, 1.27]"``."""
    middle, low, high = speedup
    if not math.isfinite(middle):
        return "-"
    as_text = f"{{:.{digits}f}}".format
    return f"{as_text(middle)}x {format_reach(middle, low, high, as_text)}"


def inverse_interval(ratio: float, low: float, high: float) -> tuple[float, float, float]:
    """Return estimate and interval of 1 / ratio; infinite for a ratio of 0."""
    middle, lower, upper = (1 / end if end else math.inf for end in (ratio, high, low))
    return middle, lower, upper


def format_detectable(fraction: float) -> str:
    """Format the smallest detectable difference: ``"±1.2 %"``; a dash above 1000 %."""
    return f"±{format_percent(fraction)}" if fraction <= _MAX_DIFFERENCE else _NOTHING


def _significant(value: float) -> str:
    if value == 0:
        return "0"
    # Digits of the rounded value, so that 999.7 gives "1000" and not "999.7".
    digits = math.floor(math.log10(abs(float(f"{value:.3g}"))))
    return f"{value:.{max(0, 2 - digits)}f}"


def with_article(name: str) -> str:
    """Prefix a name with its article: "an int", "a str", "an SGD" (which is spelt)."""
    spelt = name[:2].isalpha() and name[:2].isupper()
    vowel = name[:1].lower() in tuple("aeio") or (spelt and name[0] in "FHLMNRSX")
    return f"{'an' if vowel else 'a'} {name}"
