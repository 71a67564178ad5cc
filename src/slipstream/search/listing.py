"""A study as tables and JSON: how far it is, its best trials, and predictions beside."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.provenance import Provenance
from slipstream.search.metrics import Objective, State, Trial, best, pareto, whole
from slipstream.search.store import Reading
from slipstream.search.studies import Study
from slipstream.tables import Field, Table
from slipstream.units import format_duration


@dataclass(frozen=True)
class Listing:
    """What is known of a study, from its file or while it runs.

    Attributes:
        stopped: why its last run ended; empty where that is not known.
        promotion: how its trials were promoted, in sentences, where its policy tells that.
    """

    name: str
    trials: Sequence[Trial]
    objectives: tuple[Objective, ...]
    units: dict[str, str]
    stopped: str = ""
    promotion: Sequence[str] = ()

    @classmethod
    def of(cls, source: Study | Reading) -> Listing:
        """A study, or the reading of its file."""
        if isinstance(source, Study):
            units = dict(source.units or {})
            return cls(
                source.name, source.trials, source.objectives, units, source.stopped,
                source.rungs.notes(),
            )  # fmt: skip
        return cls(source.name, source.trials, source.objectives, source.units)

    @property
    def whole(self) -> list[Trial]:
        """Scored trials at the highest fidelity there is."""
        return whole(self.trials)

    def best(self, n: int) -> list[Trial]:
        """The `n` best of these."""
        return best(self.whole, self.objectives, n)

    @property
    def front(self) -> list[Trial]:
        """What nothing beats in all objectives at once."""
        return pareto(self.whole, self.objectives)

    @property
    def counts(self) -> dict[str, int]:
        """Trials by state."""
        tally = Counter(str(one.state) for one in self.trials)
        return {str(state): tally[str(state)] for state in State if tally[str(state)]}

    def line(self) -> str:
        """One line of progress."""
        counts = ", ".join(f"{n} {state}" for state, n in self.counts.items())
        leader = self.best(1)
        if not leader:
            return counts or "nothing yet"
        values = ", ".join(f"{o.metric} {leader[0].values[o.metric]:.4g}" for o in self.objectives)
        return f"{counts}; best {values}"

    def status(self) -> Table:
        """How far the study is, with the reasons of what failed."""
        spent = sum(one.device_s for one in self.trials)
        rows = [(state, n) for state, n in self.counts.items()]
        reasons = Counter(
            one.reason for one in self.trials if one.state in (State.FAILED, State.LOST)
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
            [*notes, *self.promotion, *self.told_beside_measured()],
        )

    def told_beside_measured(self) -> list[str]:
        """For each metric that was both predicted and measured, how the two agree."""
        lines = []
        for metric in sorted({m for one in self.trials for m, _ in one.measurements}):
            pairs = [
                (value.value, one.measurements[metric, Provenance.MEASURED].value)
                for one in self.trials
                for (name, kind), value in one.measurements.items()
                if name == metric
                and kind is not Provenance.MEASURED
                and (metric, Provenance.MEASURED) in one.measurements
            ]
            ratios = [measured / told for told, measured in pairs if told]
            if ratios:
                tau = "" if len(pairs) < 5 else f", Kendall's tau {_tau(pairs):.2f}"
                lines.append(
                    f"{metric}: measured {statistics.median(ratios):.3g} times what was predicted "
                    f"(median of {len(ratios)}{tau})"
                )
        return lines

    def top(self, n: int) -> Table:
        """The best trials."""
        return self._table(self.best(n), f"study {self.name}: the best {n}")

    def pareto(self) -> Table:
        """The front."""
        return self._table(self.front, f"study {self.name}: what nothing else beats")

    def _table(self, trials: Sequence[Trial], title: str) -> Table:
        metrics = [one.metric for one in self.objectives]
        metrics += sorted({m for one in trials for m in one.values} - set(metrics))
        fields: list[Field[Trial]] = [Field.number("trial", lambda one: one.number)]
        for metric in metrics:
            unit = self.units.get(metric, "")
            heading = f"{metric} ({unit})" if unit else metric
            fields.append(Field.number(heading, _cell(metric)))
        fields.append(Field.of("limits", lambda one: one.reason or "kept"))
        fields.append(Field.of("candidate", _in_words))
        notes = [
            "values are the search's own: the best of many looks better than it is; measure it anew"
        ]
        return Table.of(trials, fields, title, notes if trials else ["no trial is complete yet"])

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "study": self.name,
            "trials": self.counts,
            "stopped": self.stopped,
            "device_s": sum(one.device_s for one in self.trials),
            "best": [_record(one) for one in self.best(10)],
            "pareto_front": [_record(one) for one in self.front],
        }


def _cell(metric: str) -> Any:
    def cell(one: Trial) -> str:
        told = [v for (m, k), v in one.measurements.items()
                if m == metric and k is not Provenance.MEASURED]  # fmt: skip
        value = one.values.get(metric)
        if value is None:
            return "-"
        if told and (metric, Provenance.MEASURED) in one.measurements:
            return f"{value:.4g} (told {told[0].value:.4g})"
        return f"{value:.4g}"

    return cell


def _in_words(one: Trial) -> str:
    parts = [
        f"{path}={value:.4g}" if isinstance(value, float) else f"{path}={value}"
        for path, value in one.candidate.values.items()
    ]
    return " ".join(parts)


def _record(one: Trial) -> dict[str, Any]:
    return {
        "trial": one.number, "state": str(one.state), "fidelity": one.fidelity,
        "values": one.values, "candidate": dict(one.candidate.values),
        "id": one.candidate.id.hex(), "reason": one.reason,
        "measurements": [
            {"metric": metric, "provenance": str(kind), "value": value.value,
             "stddev": value.stddev}
            for (metric, kind), value in one.measurements.items()
        ],
    }  # fmt: skip


def _tau(pairs: Sequence[tuple[float, float]]) -> float:
    from scipy.stats import kendalltau

    return float(kendalltau(*zip(*pairs, strict=True)).statistic)
