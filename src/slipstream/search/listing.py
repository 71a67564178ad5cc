"""A study as tables and JSON: progress, best trials, and predictions next to measurements."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.provenance import Provenance
from slipstream.search.metrics import Objective, State, Trial, best, full_trials, pareto
from slipstream.search.store import StoredStudy
from slipstream.search.studies import Study
from slipstream.tables import Field, Table
from slipstream.units import format_duration


@dataclass(frozen=True)
class Listing:
    """Contents of a study, read from its file or taken from a running study.

    Attributes:
        stopped: reason that its last run ended; empty if unknown.
        promotion: notes of its rung policy on how trials were promoted; may be empty.
    """

    name: str
    trials: Sequence[Trial]
    objectives: tuple[Objective, ...]
    units: dict[str, str]
    stopped: str = ""
    promotion: Sequence[str] = ()

    @classmethod
    def of(cls, source: Study | StoredStudy) -> Listing:
        """Create a listing of a study, or of the reading of its file."""
        if isinstance(source, Study):
            units = dict(source.units or {})
            return cls(
                source.name, source.trials, source.objectives, units, source.stopped,
                source.rungs.notes(),
            )  # fmt: skip
        return cls(source.name, source.trials, source.objectives, source.units)

    @property
    def full_trials(self) -> list[Trial]:
        """Scored trials at the highest fidelity reached."""
        return full_trials(self.trials)

    def best(self, n: int) -> list[Trial]:
        """Return the `n` best trials at the highest fidelity reached."""
        return best(self.full_trials, self.objectives, n)

    @property
    def front(self) -> list[Trial]:
        """Pareto-optimal trials."""
        return pareto(self.full_trials, self.objectives)

    @property
    def counts(self) -> dict[str, int]:
        """Number of trials by state."""
        tally = Counter(str(trial.state) for trial in self.trials)
        return {str(state): tally[str(state)] for state in State if tally[str(state)]}

    def line(self) -> str:
        """Return the progress as one line."""
        counts = ", ".join(f"{n} {state}" for state, n in self.counts.items())
        leader = self.best(1)
        if not leader:
            return counts or "no trials yet"
        values = ", ".join(f"{o.metric} {leader[0].values[o.metric]:.4g}" for o in self.objectives)
        return f"{counts}; best {values}"

    def status(self) -> Table:
        """Return the number of trials by state, with the most common reasons of failure."""
        spent = sum(trial.device_s for trial in self.trials)
        rows = [(state, n) for state, n in self.counts.items()]
        reasons = Counter(
            trial.reason for trial in self.trials if trial.state in (State.FAILED, State.LOST)
        )
        notes = [f"device time spent: {format_duration(spent * 1e9)}"]
        notes += [f"{n} failed: {reason}" for reason, n in reasons.most_common(3)]
        notes += [self.stopped] if self.stopped else []
        fields = [
            Field[Any].of("trials", lambda row: row[0]),
            Field[Any].number("n", lambda row: row[1]),
        ]
        return Table.of(
            rows,
            fields,
            f"study {self.name}",
            [*notes, *self.promotion, *self.prediction_notes()],
        )

    def prediction_notes(self) -> list[str]:
        """Return a sentence per metric on the agreement of predicted and measured values."""
        lines = []
        for metric in sorted({m for trial in self.trials for m, _ in trial.measurements}):
            pairs = [
                (value.value, trial.measurements[metric, Provenance.MEASURED].value)
                for trial in self.trials
                for (name, kind), value in trial.measurements.items()
                if name == metric
                and kind is not Provenance.MEASURED
                and (metric, Provenance.MEASURED) in trial.measurements
            ]
            ratios = [measured / predicted for predicted, measured in pairs if predicted]
            if ratios:
                tau = "" if len(pairs) < 5 else f", Kendall's tau {_tau(pairs):.2f}"
                lines.append(
                    f"{metric}: measured {statistics.median(ratios):.3g} times the prediction "
                    f"(median of {len(ratios)}{tau})"
                )
        return lines

    def top(self, n: int) -> Table:
        """Return a table of the `n` best trials."""
        return self._table(self.best(n), f"study {self.name}: the best {n}")

    def pareto(self) -> Table:
        """Return a table of the Pareto-optimal trials."""
        return self._table(self.front, f"study {self.name}: Pareto-optimal trials")

    def _table(self, trials: Sequence[Trial], title: str) -> Table:
        metrics = [objective.metric for objective in self.objectives]
        metrics += sorted({m for trial in trials for m in trial.values} - set(metrics))
        fields: list[Field[Trial]] = [Field.number("trial", lambda trial: trial.number)]
        for metric in metrics:
            unit = self.units.get(metric, "")
            heading = f"{metric} ({unit})" if unit else metric
            fields.append(Field.number(heading, _cell(metric)))
        fields.append(Field.of("limits", lambda trial: trial.reason or "met"))
        fields.append(Field.of("candidate", _assignments))
        notes = ["the best of many noisy values is too optimistic; measure the best trials again"]
        return Table.of(trials, fields, title, notes if trials else ["no trial is complete yet"])

    def to_json(self) -> dict[str, Any]:
        """Return the study as JSON."""
        return {
            "study": self.name,
            "trials": self.counts,
            "stopped": self.stopped,
            "device_s": sum(trial.device_s for trial in self.trials),
            "best": [_record(trial) for trial in self.best(10)],
            "pareto_front": [_record(trial) for trial in self.front],
        }


def _cell(metric: str) -> Any:
    def cell(trial: Trial) -> str:
        predicted = [v for (m, k), v in trial.measurements.items()
                if m == metric and k is not Provenance.MEASURED]  # fmt: skip
        value = trial.values.get(metric)
        if value is None:
            return "-"
        if predicted and (metric, Provenance.MEASURED) in trial.measurements:
            return f"{value:.4g} (predicted {predicted[0].value:.4g})"
        return f"{value:.4g}"

    return cell


def _assignments(trial: Trial) -> str:
    parts = [
        f"{path}={value:.4g}" if isinstance(value, float) else f"{path}={value}"
        for path, value in trial.candidate.values.items()
    ]
    return " ".join(parts)


def _record(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.number, "state": str(trial.state), "fidelity": trial.fidelity,
        "values": trial.values, "candidate": dict(trial.candidate.values),
        "id": trial.candidate.id.hex(), "reason": trial.reason,
        "measurements": [
            {"metric": metric, "provenance": str(kind), "value": value.value,
             "stddev": value.stddev}
            for (metric, kind), value in trial.measurements.items()
        ],
    }  # fmt: skip


def _tau(pairs: Sequence[tuple[float, float]]) -> float:
    from scipy.stats import kendalltau

    return float(kendalltau(*zip(*pairs, strict=True)).statistic)
