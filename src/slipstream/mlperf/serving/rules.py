"""The rules: four scenarios, their durations and seeds, and what one run of LoadGen is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.mlperf.serving.statistics import fewest_queries

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
"""Seeds by round, as published results have them: every round has others."""
OFFICIAL_DURATION_S = 600.0
OFFICIAL_OFFLINE_SAMPLES = 24_576
QUERY_BYTES = 640
"""Of memory that LoadGen takes for a query made beforehand, or a sample of an offline query."""


@dataclass(frozen=True)
class Scenario:
    """How queries arrive.

    Attributes:
        name: as commands and folders have it.
        title: as LoadGen has it.
        percentile: of latency that is reported or bound; None for offline.
        queries: that the rules ask for, at least.
        metric: what is reported, in words.
        lower_is_better: of that.
    """

    name: str
    title: str
    percentile: float | None
    queries: int
    metric: str
    lower_is_better: bool


SCENARIOS = {
    one.name: one
    for one in (
        Scenario("single-stream", "SingleStream", 0.90, 64, "latency", True),
        Scenario("multi-stream", "MultiStream", 0.99, 662, "latency", True),
        Scenario("server", "Server", 0.99, 662, "queries/s", False),
        Scenario("offline", "Offline", None, 1, "samples/s", False),
    )
}

INFERRED_FROM = {"MultiStream": ("SingleStream",), "Offline": ("SingleStream", "MultiStream")}
"""Scenarios whose results at the edge may be reckoned from another one's, by title."""


def scenarios(text: str) -> list[Scenario]:
    """The scenarios that ``all`` or ``server,offline`` names, in the rules' order.

    Raises:
        UnknownNameError: another name.
    """
    wanted = [one.strip().lower() for one in text.split(",")]
    for name in wanted:
        if name not in SCENARIOS and name != "all":
            raise UnknownNameError("scenario", name, ("all", *SCENARIOS))
    return [one for name, one in SCENARIOS.items() if name in wanted or "all" in wanted]


@dataclass(frozen=True)
class Test:
    """What one run of LoadGen is asked.

    Attributes:
        scenario: a name of `SCENARIOS`.
        min_duration_s, min_queries: both must be met; of offline, `min_queries` counts samples.
        percentile: of latency; unused offline.
        samples_per_query: of multi-stream.
        rate: queries a second that arrive (server), or that are expected (offline, samples).
        bound_ns: of the percentile (server).
        expected_ns: of a query (single-stream, multi-stream): how many are made beforehand.
        max_queries: that end a run early; 0 for none.
        seeds: of the sample library, of indices and of the schedule.
        log_answers: of how many answers a performance run keeps the bytes.
        issue: which samples: drawn, always the ``same``, or each ``unique`` once.
        shuffle: seed by which samples exchange and permute elements, so that their content is new;
            0 leaves them unchanged.
    """

    __test__ = False  # nothing that pytest collects

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
                raise InvalidArgumentError(name, "it is negative")
        for name in ("rate", "bound_ns", "expected_ns", "samples_per_query"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(name, "it must be above zero")

    @property
    def queries_made(self) -> float:
        """Queries (samples, offline) that LoadGen makes before the clock starts."""
        if self.scenario == "offline":
            return max(1.1 * self.min_duration_s * self.rate, self.min_queries)
        a_second = self.rate if self.scenario == "server" else 1e9 / self.expected_ns
        samples = self.samples_per_query if self.scenario == "multi-stream" else 1
        return samples * max(self.min_duration_s * a_second, self.min_queries)

    @property
    def shortcomings(self) -> list[str]:
        """Why a run of this is not one of the rules'; empty where it is long enough.

        A result that others accept takes more than that: accuracy, audits, a review.
        """
        rules = SCENARIOS[self.scenario]
        reasons = []
        if self.mode == "performance" and self.min_duration_s < OFFICIAL_DURATION_S:
            reasons.append(f"{self.min_duration_s:g} s instead of {OFFICIAL_DURATION_S:g} s")
        needed = OFFICIAL_OFFLINE_SAMPLES if self.scenario == "offline" else rules.queries
        if self.mode == "performance" and self.min_queries < needed:
            reasons.append(f"{self.min_queries} instead of {needed} queries")
        if rules.percentile is not None and self.percentile < rules.percentile:
            reasons.append(f"p{100 * self.percentile:g} instead of p{100 * rules.percentile:g}")
        if self.seeds != (QSL_SEED, INDEX_SEED, SCHEDULE_SEED):
            reasons.append("other seeds")
        if self.max_queries:
            reasons.append(f"ended after {self.max_queries} queries")
        return reasons

    def to_json(self) -> dict[str, Any]:
        """What another process makes the same test of."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Test:
        """The test that `to_json` wrote."""
        return cls(**{**given, "seeds": tuple(given["seeds"])})


def percentile_for(wanted: float, queries: float) -> float:
    """`wanted`, or the highest usual percentile below it that so many queries can support."""
    lower = [p for p in (0.99, 0.97, 0.95, 0.90, 0.75, 0.50) if p < wanted]
    for percentile in (wanted, *lower):
        if fewest_queries(percentile) <= queries:
            return percentile
    return lower[-1] if lower else wanted
