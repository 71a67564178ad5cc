"""What a benchmark under load gave: a row a scenario, what was foreseen beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.mlperf.serving import planning
from slipstream.mlperf.serving.audits import Audit, audit, audit_table, need_audits
from slipstream.mlperf.serving.rules import SCENARIOS, Scenario
from slipstream.mlperf.serving.session import Run, Session
from slipstream.mlperf.serving.tree import Place, write_scenario, write_system
from slipstream.tables import Field, Table
from slipstream.units import format_duration, format_percent


@dataclass(frozen=True)
class Row:
    """A scenario's run, and what the queue simulation predicted before it."""

    run: Run

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
        """The metric as the rules have it."""
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
        """A latency of queries; offline has one query, which says nothing."""
        latency_ns = self.run.latencies_ns.get(name)
        return (
            "-"
            if latency_ns is None or self.run.test.scenario == "offline"
            else format_duration(latency_ns)
        )

    def foreseen_ns(self, name: str) -> float | None:
        """A latency as the queue simulation predicts it, in ns; None if it predicts none."""
        if self.run.predicted is None or not self.run.predicted.keeps_up:
            return None
        if name == "mean":
            return self.run.predicted.mean_ns
        return self.run.predicted.percentile_ns(float(name.removeprefix("p")) / 100)


@dataclass(frozen=True)
class Served:
    """The result of ``slipstream mlperf serve``.

    Attributes:
        about: model, runtime and samples.
        accuracy: share of samples whose class is right; None where samples have no classes.
        audits: those that were asked for, of all scenarios.
        notes: what whoever reads the numbers must know.
    """

    about: Mapping[str, Any]
    policy: str
    rows: tuple[Row, ...]
    accuracy: float | None
    audits: tuple[Audit, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the audits that the system failed; undecided audits are not among them."""
        return tuple(audit.name for audit in self.audits if audit.passed is False)

    @property
    def valid(self) -> bool:
        """Whether every run is, and every audit passed."""
        return all(row.run.valid for row in self.rows) and all(one.passed for one in self.audits)

    @property
    def cautions(self) -> list[str]:
        """Reasons that predicted latencies are missing or unreliable, by scenario."""
        return [row.caution for row in self.rows if row.caution]

    def tables(self) -> list[Table]:
        """Runs, and audits where there are any."""
        return [self.table(), *([audit_table(self.audits)] if self.audits else [])]

    def table(self) -> Table:
        """A row a scenario."""
        fields: tuple[Field[Row], ...] = (
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
        right = "" if self.accuracy is None else f"accuracy: {format_percent(self.accuracy)}"
        samples = f"{self.about['samples']:,} samples of {self.about['sample_bytes']:,} bytes"
        every = [f"{right} of {samples}" if right else samples, *reasons, *labels, *self.notes]
        return Table.of(self.rows, fields, title, every)

    def to_json(self) -> dict[str, Any]:
        """The result for programs."""
        return {
            **self.about,
            "batching": self.policy,
            "accuracy": self.accuracy,
            "valid": self.valid,
            "runs": [
                {
                    **row.run.to_json(),
                    "predicted_ns": {n: row.foreseen_ns(n) for n in ("mean", "p50", "p99")}
                    if row.run.predicted
                    else None,
                }
                for row in self.rows
            ],
            "audits": [vars(one) for one in self.audits],
            "notes": [*self.cautions, *self.notes],
        }


def _predicted(row: Row) -> str:
    if row.run.predicted is not None and not row.run.predicted.keeps_up:
        return "grows"
    p99_ns = row.foreseen_ns("p99")
    return "-" if p99_ns is None else format_duration(p99_ns)


def benchmark(
    session: Session,
    chosen: Sequence[Scenario],
    wishes: planning.Wishes,
    *,
    place: Place | None = None,
    audits: Sequence[str] = (),
    gate: float | None = None,
) -> Served:
    """A performance run of each scenario, and one of accuracy where samples have classes.

    Args:
        place: where the tree of results is written; None: nowhere.
        audits: that each scenario has to stand, of `slipstream.mlperf.serving.audits.AUDITS`.
        gate: accuracy that is asked for, noted in the tree.

    Raises:
        UnknownNameError: there is no such audit.
        SlipstreamError: the model failed or did not answer, or `place` cannot be written.
    """
    need_audits(audits)
    rows, right = [], None
    stood: list[Audit] = []
    earlier: dict[str, tuple[Audit, Path | None]] = {}
    for scenario in chosen:
        folder = None if place is None else place.scenario(scenario)
        logs = None if place is None else place.performance(scenario)
        run = planning.measured(session, scenario, wishes, logs)
        rows.append(Row(run))
        audited = audit(audits, session.again, session, scenario, wishes, folder, earlier)
        stood += [one for one in audited if one not in stood]
        earlier = {one.name: (one, folder and folder / one.name) for one in audited}
        if place is not None or (session.labelled and right is None):
            logs = None if place is None else place.accuracy(scenario)
            right = planning.accuracy(session, scenario, logs).value
        if place is not None:
            write_scenario(
                place, scenario, run, right, samples=session.about["samples"],
                performance_samples=session.about["performance_samples"], gate=gate, audits=audited,
            )  # fmt: skip
    if place is not None:
        write_system(place)
    return Served(session.about, str(session.policy), tuple(rows), right, tuple(stood))
