"""A row of a benchmark: its target, the measurement, and whether the target is met.

A bench is a generator ``bars(options) -> Iterator[Bar]``, registered in the entry-point group
``slipstream.benches`` and run by ``slipstream bench NAME``. It yields each row when it is measured,
so that a killed ``--full`` run keeps its rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Source = Literal["now", "recorded"]
Standing = Literal["holds", "at the bar", "falls short", "not judged"]


@dataclass(frozen=True)
class Bar:
    """A target and its measurement.

    Attributes:
        bar: what is measured, in a few words; the row's key within its bench.
        value: the measurement, in `unit`; None if it could not be measured.
        unit: ``"x"``, ``"ms"``, ``"M tasks/s"``, ``"of 200"``, ...
        target: the target as text that a reader can check: ``">= 20"``.
        holds: True, False, or None with the reason in `detail`.
        n: number of independent measurements of `value`.
        detail: spread, conditions, or why the row is not judged; for readers only.
        limit: the target as a number, in `unit`; None if it is not one number.
        low, high: an interval of `value` from its noise, in `unit`; None if unknown.
        commit, date: commit and date of the measurement.
        device: device of the measurement: ``"cpu"``, or an accelerator's name.
        processor: processor of the machine.
        sources: hash of the sources that it depends on (`records.sources_hash`).
        data: measurements behind `value`, and inputs of other rows, as JSON.
    """

    bar: str
    value: float | None
    unit: str
    target: str
    holds: bool | None
    n: int = 1
    detail: str = ""
    limit: float | None = None
    low: float | None = None
    high: float | None = None
    source: Source = "now"
    commit: str = ""
    date: str = ""
    device: str = ""
    processor: str = ""
    sources: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> str:
        """The value with its unit; a dash without a value."""
        return "-" if self.value is None else f"{self.value:.4g} {self.unit}"

    @property
    def when(self) -> str:
        """``now``, or date and commit of a recorded row."""
        return self.source if self.source == "now" else f"{self.date} {self.commit[:7]}"

    @property
    def standing(self) -> Standing:
        """Whether the target is met; ``at the bar`` if the interval includes the target."""
        if self.holds is None:
            return "not judged"
        low, limit, high = self.low, self.limit, self.high
        if None not in (low, limit, high) and low < limit < high:  # type: ignore[operator]
            return "at the bar"
        return "holds" if self.holds else "falls short"


@dataclass(frozen=True)
class BenchOptions:
    """Settings of a run of a bench.

    Attributes:
        full: the whole grid (may take long, resumable) rather than at most three minutes.
        only: run only bars whose name contains this text; empty for all.
        done: bars already measured by an interrupted full run, by name; skip these.
        recorded: bars of full runs of any commit, by name: inputs of summary rows if only some of
            these are measured again.
        progress: called with a short line before anything slow.
        budget_s: seconds from now after which no further row begins.
        left_out: bars that did not fit the budget, in order; `wants` adds them.
    """

    full: bool = False
    only: str = ""
    done: Mapping[str, Bar] = field(default_factory=dict)
    recorded: Mapping[str, Bar] = field(default_factory=dict)
    progress: Callable[[str], None] = field(default=lambda line: None)
    budget_s: float = math.inf
    left_out: dict[str, None] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def wants(self, bar: str, takes_s: float = 0.0) -> bool:
        """Return whether to measure the row named `bar` in this run, within the remaining budget.

        Args:
            takes_s: duration of the row in seconds, if long.
        """
        if self.only not in bar or bar in self.done:
            return False
        if self.left_s() > takes_s:
            return True
        self.left_out[bar] = None
        return False

    def left_s(self) -> float:
        """Return the remaining seconds of the budget."""
        return self.budget_s - (time.monotonic() - self._began)


class Bench(Protocol):
    """A member of the entry-point group ``slipstream.benches``."""

    def __call__(self, options: BenchOptions, /) -> Iterator[Bar]: ...


def at_least(
    bar: str, value: float, target: float, unit: str, *, n: int = 1, detail: str = "",
    data: Mapping[str, Any] | None = None,
) -> Bar:  # fmt: skip
    """Return a row that holds if `value` reaches `target`."""
    holds, words = value >= target, f">= {target:g}"
    return Bar(bar, value, unit, words, holds, n, detail, target, data=data or {})


def at_most(
    bar: str, value: float, target: float, unit: str, *, n: int = 1, detail: str = "",
    data: Mapping[str, Any] | None = None,
) -> Bar:  # fmt: skip
    """Return a row that holds if `value` does not exceed `target`."""
    holds, words = value <= target, f"<= {target:g}"
    return Bar(bar, value, unit, words, holds, n, detail, target, data=data or {})


def for_all_seeds(
    options: BenchOptions,
    prefix: str,
    properties: Sequence[tuple[str, Callable[[int], bool]]],
    *,
    quick: int,
    full: int,
    detail: str,
) -> Iterator[Bar]:
    """Yield one row per property, which holds if the property does for every seed.

    Args:
        prefix: beginning of the rows' names.
        quick, full: number of seeds, from 0, in a quick and in a full run.
        detail: what a seed generates.
    """
    count = full if options.full else quick
    for name, holds in properties:
        bar = f"{prefix}: {name}"
        if not options.wants(bar):
            continue
        options.progress(bar)
        failed = [seed for seed in range(count) if not holds(seed)]
        note = detail if options.full else f"{detail}; quick: {count} instead of {full}"
        if failed:
            note = f"fails for seeds {failed[:5]}"
        passed = count - len(failed)
        yield Bar(bar, passed, f"of {count}", f"= {count}", not failed, count, note)


def not_judged(
    bar: str, unit: str, target: str, reason: str, data: Mapping[str, Any] | None = None
) -> Bar:
    """Return a row without a measurement, and the reason."""
    return Bar(bar, None, unit, target, None, 0, reason, data=data or {})
