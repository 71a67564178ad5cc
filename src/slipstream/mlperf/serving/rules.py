"""The rules: scenarios, durations and seeds, and the settings of a LoadGen run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.mlperf.serving.statistics import min_queries

Mode = Literal["performance", "accuracy", "peak"]
NOT_A_RESULT = "not an MLPerf result"
QSL_SEED, INDEX_SEED, SCHEDULE_SEED = (
    2085463073848966840, 2747215439041700203, 16159082839903944936,
)  # fmt: skip
ROUND_SEEDS = {
    "6.0": (QSL_SEED, INDEX_SEED, SCHEDULE_SEED),
    "5.1": (1780908523862526354, 14771362308971278857, 18209322760996052031),
    "4.1": (3066443479025735752, 10688027786191513374, 14962580496156340209),
    "1.0": (7322528924094909334, 1570999273408051088, 3507442325620259414),
}
"""Seeds by round, from published results."""
OFFICIAL_DURATION_S = 600.0
OFFICIAL_OFFLINE_SAMPLES = 24_576
QUERY_BYTES = 640
"""Memory that LoadGen takes per query, or per sample of an offline query."""


@dataclass(frozen=True)
class Scenario:
    """An arrival pattern of queries.

    Attributes:
        name: name in commands and folders.
        title: name in LoadGen.
        percentile: latency percentile that is reported or bounded; None for offline.
        queries: minimum number of queries.
        metric: reported metric, or its unit.
        lower_is_better: whether a lower metric is better.
    """

    name: str
    title: str
    percentile: float | None
    queries: int
    metric: str
    lower_is_better: bool


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("single-stream", "SingleStream", 0.90, 64, "latency", True),
        Scenario("multi-stream", "MultiStream", 0.99, 662, "latency", True),
        Scenario("server", "Server", 0.99, 662, "queries/s", False),
        Scenario("offline", "Offline", None, 1, "samples/s", False),
    )
}

INFERRED_FROM = {"MultiStream": ("SingleStream",), "Offline": ("SingleStream", "MultiStream")}
"""Edge scenarios whose results may be inferred from another scenario's, by title."""


def scenarios(text: str) -> list[Scenario]:
    """Parse names such as ``all`` or ``server,offline``, and return scenarios in the rules' order.

    Raises:
        UnknownNameError: a name is unknown.
    """
    names = [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name not in SCENARIOS and name != "all":
            raise UnknownNameError("scenario", name, ("all", *SCENARIOS))
    return [found for name, found in SCENARIOS.items() if name in names or "all" in names]


@dataclass(frozen=True)
class Test:
    """Settings of one LoadGen run.

    Attributes:
        scenario: a name of `SCENARIOS`.
        min_duration_s, min_queries: both must be met; for offline, `min_queries` counts samples.
        percentile: latency percentile; unused for offline.
        samples_per_query: samples per query of multi-stream.
        rate: arriving queries/s (server), or expected samples/s (offline).
        bound_ns: bound of the percentile (server).
        expected_ns: expected time of a query (single-stream, multi-stream), which determines how
            many LoadGen creates.
        max_queries: queries after which a run ends early; 0 for no limit.
        seeds: seeds of the sample library, of the indices and of the schedule.
        log_answers: number of answers whose bytes a performance run logs.
        issue: ``drawn`` for random samples, the ``same`` one always, or each ``unique`` once.
        shuffle: seed of new samples, see `slipstream.mlperf.serving.library`; 0 for the originals.
    """

    __test__ = False  # not a pytest class

    scenario: str
    mode: Mode = "performance"
    min_duration_s: float = OFFICIAL_DURATION_S
    min_queries: int = 1
    percentile: float = 0.99
    samples_per_query: int = 8
    rate: float = 1.0
    bound_ns: float = 1e8
    expected_ns: float = 1e6
    max_queries: int = 0
    seeds: tuple[int, int, int] = (QSL_SEED, INDEX_SEED, SCHEDULE_SEED)
    log_answers: int = 0
    issue: Literal["drawn", "same", "unique"] = "drawn"
    shuffle: int = 0

    def __post_init__(self) -> None:
        if self.scenario not in SCENARIOS:
            raise UnknownNameError("scenario", self.scenario, SCENARIOS)
        if not 0 < self.percentile < 1:
            raise InvalidArgumentError("percentile", f"{self.percentile} is not between 0 and 1")
        for name in ("min_duration_s", "min_queries", "max_queries"):
            if getattr(self, name) < 0:
                raise InvalidArgumentError(name, f"{getattr(self, name)} is negative")
        for name in ("rate", "bound_ns", "expected_ns", "samples_per_query"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(name, f"{getattr(self, name)} is not above zero")

    @property
    def queries_made(self) -> float:
        """Number of queries (samples for offline) that LoadGen creates before the clock starts."""
        if self.scenario == "offline":
            return max(1.1 * self.min_duration_s * self.rate, self.min_queries)
        query_rate = self.rate if self.scenario == "server" else 1e9 / self.expected_ns
        samples = self.samples_per_query if self.scenario == "multi-stream" else 1
        return samples * max(self.min_duration_s * query_rate, self.min_queries)

    @property
    def shortcomings(self) -> list[str]:
        """Reasons why a run does not meet the rules; a result also needs audits and a review."""
        rules = SCENARIOS[self.scenario]
        reasons = []
        if self.mode == "performance" and self.min_duration_s < OFFICIAL_DURATION_S:
            reasons.append(f"{self.min_duration_s:g} s instead of {OFFICIAL_DURATION_S:g} s")
        needed = OFFICIAL_OFFLINE_SAMPLES if self.scenario == "offline" else rules.queries
        if self.mode == "performance" and self.min_queries < needed:
            reasons.append(f"{self.min_queries} queries instead of {needed}")
        if rules.percentile is not None and self.percentile < rules.percentile:
            reasons.append(f"p{100 * self.percentile:g} instead of p{100 * rules.percentile:g}")
        if self.seeds != (QSL_SEED, INDEX_SEED, SCHEDULE_SEED):
            reasons.append("unofficial seeds")
        if self.max_queries:
            reasons.append(f"ended after {self.max_queries} queries")
        return reasons

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON, for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> Test:
        """Restore the settings from `to_json`."""
        return cls(**{**settings, "seeds": tuple(settings["seeds"])})


def percentile_for(target: float, queries: float) -> float:
    """Return `target`, or the highest usual percentile below it that the queries can support."""
    lower = [p for p in (0.99, 0.97, 0.95, 0.90, 0.75, 0.50) if p < target]
    for percentile in (target, *lower):
        if min_queries(percentile) <= queries:
            return percentile
    return lower[-1] if lower else target
