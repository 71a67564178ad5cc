"""What `prove` says of sides that several processes took together: a second table."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.tables import Column, Table

if TYPE_CHECKING:
    from slipstream.measure.comparison import Comparison
    from slipstream.measure.records import Experiment


def ranks_rows(comparison: Comparison, workers: Mapping[str, int]) -> list[dict[str, Any]]:
    """One row a side: the whole step and a rank's bytes, predicted and measured; losses.

    Args:
        workers: by side: how many ranks took its step, and had their replicas compared after
            every turn: a side whose replicas differed has failed, and has no row.
    """
    from slipstream.errors import InvalidArgumentError
    from slipstream.measure.checks import checks_of
    from slipstream.measure.records import Phase
    from slipstream.verbs._ranks import SENT, STEP

    experiment = comparison.experiment
    checks = checks_of(experiment.events)
    failed = {event.detail.get("arm") for event in experiment.events if event.kind == "failed"}
    rows: list[dict[str, Any]] = []
    for name, count in workers.items():
        step = experiment.series.get((name, STEP, Phase.MEASURE))
        sent = experiment.series.get((name, SENT, Phase.MEASURE))
        if step is None or sent is None or name in failed:
            continue
        predicted = experiment.predictions.get(name)
        known = {} if predicted is None else predicted.detail
        check = checks.get(name)
        row: dict[str, Any] = {
            "technique": name,
            "ranks": count,
            "step_ns": statistics.median(step.values.tolist()),
            "predicted_step_ns": known.get("step_ns"),
            "sent_bytes": statistics.median(sent.values.tolist()),
            "predicted_sent_bytes": known.get("sent_bytes"),
            "replicas": "equal to the bit",
            "loss_after": None if check is None else check.steps,
            "loss": _mean(check.candidate) if check is not None else None,
            "loss_as_it_is": _mean(check.baseline) if check is not None else None,
            "against": rows[0]["technique"] if rows else None,
            "ratio": None,
        }
        if rows:
            with contextlib.suppress(InvalidArgumentError):
                claim = comparison.ratio(name, rows[0]["technique"], "wall")
                row["ratio"] = [claim.ratio, claim.low, claim.high]
        rows.append(row)
    return rows


def workers_of(experiment: Experiment) -> dict[str, int]:
    """By side: how many ranks took its step, of those whose samples are a team's.

    A technique that is not installed any more is left out.
    """
    from slipstream import technique
    from slipstream.errors import SlipstreamError
    from slipstream.measure.records import Phase
    from slipstream.verbs._ranks import STEP, ranks_of

    found: dict[str, int] = {}
    for arm in experiment.arms:
        if (arm.name, STEP, Phase.MEASURE) in experiment.series:
            with contextlib.suppress(SlipstreamError):
                found[arm.name] = ranks_of(technique.parse(arm.name))
    return found


def ranks_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a person reads them."""
    from slipstream.units import format_bytes, format_duration, format_reach

    first = rows[0]["technique"] if rows else ""
    shown = []
    for row in rows:
        ratio = row["ratio"]
        reach = "-" if ratio is None else f"{ratio[0]:.3f} {format_reach(*ratio)}"
        loss = "-"
        if row["loss"] is not None:
            loss = f"{row['loss_as_it_is']:.4g} / {row['loss']:.4g} after {row['loss_after']}"
        shown.append(
            (
                row["technique"],
                _beside(row["predicted_step_ns"], row["step_ns"], format_duration),
                reach,
                _beside(row["predicted_sent_bytes"], row["sent_bytes"], format_bytes),
                row["replicas"],
                loss,
            )
        )
    columns = [
        Column("ranks"),
        Column("step: predicted, measured", "right"),
        Column(f"time / {first}", "right"),
        Column("sent by a rank", "right"),
        Column("replicas"),
        Column("loss: as it is / ranks", "right"),
    ]
    notes = [
        "a step of all ranks together; bytes are predicted without headers, and counted at the "
        "interface with them (4.6 % of full packets); replicas are compared after every turn; the "
        "loss is the mean of all ranks' own batches",
    ]
    return Table(columns, shown, title="ranks", notes=notes)


def _beside(predicted: float | None, measured: float, write: Any) -> str:
    if not predicted:
        return f"-, {write(measured)}"
    return f"{write(predicted)}, {write(measured)} ({100 * (predicted / measured - 1):+.1f} %)"


def _mean(values: tuple[float, ...]) -> float | None:
    return statistics.fmean(values) if values else None
