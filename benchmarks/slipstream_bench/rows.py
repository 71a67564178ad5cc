"""One row of a benchmark: a bar, what was measured, and whether it holds.

A bench is a generator ``bars(options) -> Iterator[Bar]``, registered in the entry-point group
``slipstream.benches`` and run by ``slipstream bench NAME``. It yields each row as soon as it is
known, so that a killed ``--full`` run keeps what it had.
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
    """What must hold, and what was measured.

    Attributes:
        bar: what is measured, in a few words; the row's key within its bench.
        value: the measurement, in `unit`; None where it could not be measured.
        unit: ``"x"``, ``"ms"``, ``"M tasks/s"``, ``"of 200"``, ...
        target: the bar in words a reader can check: ``">= 20"``.
        holds: True, False, or None with the reason in `detail`.
        n: how many independent measurements stand behind `value`.
        detail: spread, conditions, or why it is not judged; a sentence, which nobody reads back.
        limit: the target's number, in `unit`; None where it is none.
        low, high: an interval of `value` by its own noise, in `unit`; None where it is not known.
        commit, date: of the measurement.
        device: what it ran on: ``"cpu"``, or an accelerator's name.
        processor: of the machine.
        sources: hash of the sources it rests on (`records.sources_hash`).
        data: what `value` was made of and what other rows rest on, as JSON can hold it.
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
        """The value with its unit; a dash where there is none."""
        return "-" if self.value is None else f"{self.value:.4g} {self.unit}"

    @property
    def when(self) -> str:
        """Now, or when and at which commit it was recorded."""
        return self.source if self.source == "now" else f"{self.date} {self.commit[:7]}"

    @property
    def standing(self) -> Standing:
        """Whether it holds; ``at the bar`` where its own noise leaves that open."""
        if self.holds is None:
            return "not judged"
        low, limit, high = self.low, self.limit, self.high
        if None not in (low, limit, high) and low < limit < high:  # type: ignore[operator]
            return "at the bar"
        return "holds" if self.holds else "falls short"


@dataclass(frozen=True)
class BenchOptions:
    """How a bench is run.

    Attributes:
        full: the whole grid (may take long, resumable) rather than at most three minutes.
        only: run only bars whose name contains this text; empty for all.
        done: bars already measured by an interrupted full run, by name; skip these.
        recorded: bars of full runs of any commit, by name: what rows over many others may rest
            on when only some of these are measured again.
        progress: called with a short line before anything slow.
        budget_s: seconds from now on after which no further row is begun.
        left_out: bars that the budget left no time for, in order; `wants` notes them.
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
        """Whether the row named `bar` is to be measured in this run, and there is time for it.

        Args:
            takes_s: seconds that it takes, where that is long.
        """
        if self.only not in bar or bar in self.done:
            return False
        if self.left_s() > takes_s:
            return True
        self.left_out[bar] = None
        return False

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget_s - (time.monotonic() - self._began)


class Bench(Protocol):
    """What the entry-point group ``slipstream.benches`` holds."""

    def __call__(self, options: BenchOptions, /) -> Iterator[Bar]: ...


def at_least(
    bar: str, value: float, target: float, unit: str, *, n: int = 1, detail: str = "",
    data: Mapping[str, Any] | None = None,
) -> Bar:  # fmt: skip
    """A row that holds when `value` reaches `target`."""
    holds, words = value >= target, f">= {target:g}"
    return Bar(bar, value, unit, words, holds, n, detail, target, data=data or {})


def at_most(
    bar: str, value: float, target: float, unit: str, *, n: int = 1, detail: str = "",
    data: Mapping[str, Any] | None = None,
) -> Bar:  # fmt: skip
    """A row that holds when `value` does not exceed `target`."""
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
    """A row a property, that holds when the property does for each of the seeds.

    Args:
        prefix: of the rows' names.
        quick, full: how many seeds, from 0 on, each kind of run takes.
        detail: what is made from a seed.
    """
    count = full if options.full else quick
    for name, holds in properties:
        bar = f"{prefix}: {name}"
        if not options.wants(bar):
            continue
        options.progress(bar)
        failed = [seed for seed in range(count) if not holds(seed)]
        said = detail if options.full else f"{detail}; quick: {count} instead of {full}"
        if failed:
            said = f"fails for seeds {failed[:5]}"
        passed = count - len(failed)
        yield Bar(bar, passed, f"of {count}", f"= {count}", not failed, count, said)


def not_judged(
    bar: str, unit: str, target: str, reason: str, data: Mapping[str, Any] | None = None
) -> Bar:
    """A row that cannot be measured here, and why."""
    return Bar(bar, None, unit, target, None, 0, reason, data=data or {})
