"""Results of a benchmark under load, with measured and predicted latencies per scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.mlperf.serving import planning
from slipstream.mlperf.serving.audits import Audit, audit, audit_table, need_audits
from slipstream.mlperf.serving.rules import SCENARIOS, Scenario
from slipstream.mlperf.serving.session import LoadTestRun, Session
from slipstream.mlperf.serving.tree import Place, write_scenario, write_system
from slipstream.tables import Field, Table
from slipstream.units import format_duration, format_percent


@dataclass(frozen=True)
class ScenarioResult:
    """A scenario's run with the prediction made before it."""

    run: LoadTestRun

    @property
    def caution(self) -> str:
        """Reason that a server's latencies are not predicted, or unreliable; else empty."""
        if self.run.test.scenario != "server":
            return ""
        if self.run.predicted is None:
            return (
                "server: latencies are not predicted, because other programs disturbed the "
                "calibration; run again on a quiet machine"
            )
        if not self.run.predicted.keeps_up:
            return (
                f"server: {self.run.test.rate:,.1f} queries/s are more than the predicted "
                "capacity: latency grows as long as the run lasts"
            )
        return ""

    @property
    def result(self) -> str:
        """The metric of the rules, formatted."""
        run = self.run
        if run.value is None:
            return "-"
        if SCENARIOS[run.test.scenario].metric == "latency":
            return f"p{100 * run.test.percentile:g} {format_duration(run.value)}"
        bound = f" (p{100 * run.test.percentile:g} < {format_duration(run.test.bound_ns)})"
        shown = f"{run.value:,.1f}" if run.value < 1000 else f"{run.value:,.0f}"
        unit = SCENARIOS[run.test.scenario].metric
        return f"{shown} {unit}" + (bound if run.test.scenario == "server" else "")

    def latency(self, name: str) -> str:
        """Return a formatted latency; "-" for offline, which has a single query."""
        latency_ns = self.run.latencies_ns.get(name)
        if latency_ns is None or self.run.test.scenario == "offline":
            return "-"
        return format_duration(latency_ns)

    def predicted_ns(self, name: str) -> float | None:
        """Return a predicted latency in ns; None without a prediction."""
        if self.run.predicted is None or not self.run.predicted.keeps_up:
            return None
        if name == "mean":
            return self.run.predicted.mean_ns
        return self.run.predicted.percentile_ns(float(name.removeprefix("p")) / 100)


@dataclass(frozen=True)
class ServingResult:
    """The result of ``slipstream mlperf serve``.

    Attributes:
        about: facts about model, runtime and samples.
        accuracy: share of samples with the correct class; None without labels.
        audits: results of the requested audits, of all scenarios.
        notes: caveats shown below the table.
    """

    about: Mapping[str, Any]
    policy: str
    rows: tuple[ScenarioResult, ...]
    accuracy: float | None
    audits: tuple[Audit, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of failed audits, without inconclusive ones."""
        return tuple(audit.name for audit in self.audits if audit.passed is False)

    @property
    def valid(self) -> bool:
        """Whether every run is valid and every audit passed."""
        return all(row.run.valid for row in self.rows) and all(a.passed for a in self.audits)

    @property
    def cautions(self) -> list[str]:
        """Reasons that predicted latencies are missing or unreliable, by scenario."""
        return [row.caution for row in self.rows if row.caution]

    def tables(self) -> list[Table]:
        """Return the table of runs, and of audits if there are any."""
        return [self.table(), *([audit_table(self.audits)] if self.audits else [])]

    def table(self) -> Table:
        """Return a table with a row per scenario."""
        fields: tuple[Field[ScenarioResult], ...] = (
            Field.of("scenario", lambda row: row.run.test.scenario),
            Field.of("valid", lambda row: "yes" if row.run.valid else "no"),
            Field.number("result", lambda row: row.result),
            Field.number("p50", lambda row: row.latency("p50")),
            Field.number("p99", lambda row: row.latency("p99")),
            Field.number("p99 predicted", _predicted, optional=True),
            Field.number("queries", lambda row: f"{row.run.queries:,}", optional=True),
        )
        title = f"{self.about['model']} on {self.about['kind']}, {self.policy}"
        labels = dict.fromkeys(f"{row.run.test.scenario}: {row.run.label}" for row in self.rows)
        reasons = [
            f"{row.run.test.scenario} is not valid: {reason}"
            for row in self.rows
            for reason in row.run.reasons
        ]
        reasons += self.cautions
        samples = f"{self.about['samples']:,} samples of {self.about['sample_bytes']:,} bytes"
        if self.accuracy is not None:
            samples = f"accuracy: {format_percent(self.accuracy)} of {samples}"
        return Table.of(self.rows, fields, title, [samples, *reasons, *labels, *self.notes])

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return {
            **self.about,
            "batching": self.policy,
            "accuracy": self.accuracy,
            "valid": self.valid,
            "runs": [
                {
                    **row.run.to_json(),
                    "predicted_ns": {n: row.predicted_ns(n) for n in ("mean", "p50", "p99")}
                    if row.run.predicted
                    else None,
                }
                for row in self.rows
            ],
            "audits": [vars(audit) for audit in self.audits],
            "notes": [*self.cautions, *self.notes],
        }


def _predicted(row: ScenarioResult) -> str:
    if row.run.predicted is not None and not row.run.predicted.keeps_up:
        return "grows"
    p99_ns = row.predicted_ns("p99")
    return "-" if p99_ns is None else format_duration(p99_ns)


def benchmark(
    session: Session,
    chosen: Sequence[Scenario],
    config: planning.LoadTestConfig,
    *,
    place: Place | None = None,
    audits: Sequence[str] = (),
    gate: float | None = None,
) -> ServingResult:
    """Run each scenario for performance, and one for accuracy if samples have labels.

    Args:
        place: where to write the tree of results; None to write none.
        audits: audits to run for each scenario, from `slipstream.mlperf.serving.AUDITS`.
        gate: required accuracy, stored in the tree.

    Raises:
        UnknownNameError: there is no such audit.
        SlipstreamError: the model failed or did not answer, or `place` cannot be written.
    """
    need_audits(audits)
    rows, correct = [], None
    distinct: list[Audit] = []
    earlier: dict[str, tuple[Audit, Path | None]] = {}
    for scenario in chosen:
        folder = None if place is None else place.scenario(scenario)
        logs = None if place is None else place.performance(scenario)
        run = planning.run_scenario(session, scenario, config, logs)
        rows.append(ScenarioResult(run))
        audited = audit(audits, session.again, session, scenario, config, folder, earlier)
        distinct += [found for found in audited if found not in distinct]
        earlier = {found.name: (found, folder and folder / found.name) for found in audited}
        if place is not None or (session.labelled and correct is None):
            logs = None if place is None else place.accuracy(scenario)
            correct = planning.accuracy(session, scenario, logs).value
        if place is not None:
            write_scenario(
                place, scenario, run, correct, samples=session.about["samples"],
                performance_samples=session.about["performance_samples"], gate=gate, audits=audited,
            )  # fmt: skip
    if place is not None:
        write_system(place)
    return ServingResult(session.about, str(session.policy), tuple(rows), correct, tuple(distinct))
