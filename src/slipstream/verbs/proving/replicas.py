"""Report sides of a proof that ran on several ranks: steps, bytes, replicas, losses."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slipstream import technique
from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.measure.checks import checks_of
from slipstream.measure.comparison import Comparison
from slipstream.measure.records import Experiment, Phase
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_duration, format_speedup, inverse_interval
from slipstream.verbs.proving.ranks import SENT, STEP, are_replicas, ranks_of


@dataclass(frozen=True)
class RanksSide:
    """Step time, bytes and losses of a side that ran on several ranks.

    Attributes:
        step_ns, predicted_step_ns: of a step of all ranks together.
        sent_bytes, predicted_sent_bytes: by a rank per step.
        replicas: the outcome of comparing them after every turn; ``stages`` if ranks have different
            layers.
        loss_after: number of steps from the same seeds; None if the loss was not checked.
        loss, loss_as_it_is: mean over the seeds after these steps, of the ranks and the baseline.
        against: the first side, the reference of `speedup`; None for the first side.
        speedup, speedup_interval: None for the first side.
    """

    technique: str
    ranks: int
    step_ns: float
    predicted_step_ns: float | None
    sent_bytes: float
    predicted_sent_bytes: float | None
    replicas: str
    loss_after: int | None
    loss: float | None
    loss_as_it_is: float | None
    against: str | None = None
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None


def ranks_sides(comparison: Comparison, workers: Mapping[str, int]) -> list[RanksSide]:
    """Return the sides of a comparison that ran on real ranks.

    Args:
        workers: number of ranks by side; replicas were compared after every turn, and sides whose
            replicas differed have failed and are left out.
    """
    experiment = comparison.experiment
    checks = checks_of(experiment.events)
    failed = {event.detail.get("arm") for event in experiment.events if event.kind == "failed"}
    sides: list[RanksSide] = []
    for name, count in workers.items():
        step = experiment.series.get((name, STEP, Phase.MEASURE))
        sent = experiment.series.get((name, SENT, Phase.MEASURE))
        if step is None or sent is None or name in failed:
            continue
        predicted = experiment.predictions.get(name)
        detail = {} if predicted is None else predicted.detail
        check = checks.get(name)
        against, speedup, interval = sides[0].technique if sides else None, None, None
        if against is not None:
            with contextlib.suppress(InvalidArgumentError):
                claim = comparison.ratio(name, against, "wall")
                speedup, *ends = inverse_interval(claim.ratio, claim.low, claim.high)
                interval = ends[0], ends[1]
        sides.append(
            RanksSide(
                name,
                count,
                statistics.median(step.values.tolist()),
                detail.get("step_ns"),
                statistics.median(sent.values.tolist()),
                detail.get("sent_bytes"),
                "equal to the bit" if are_replicas(technique.parse(name)) else "stages",
                None if check is None else check.steps,
                None if check is None else _mean(check.candidate),
                None if check is None else _mean(check.baseline),
                against,
                speedup,
                interval,
            )
        )
    return sides


def workers_of(experiment: Experiment) -> dict[str, int]:
    """Return the number of ranks of each side that was measured with several.

    Leaves out techniques that are no longer installed.
    """
    counts: dict[str, int] = {}
    for arm in experiment.arms:
        if (arm.name, STEP, Phase.MEASURE) in experiment.series:
            with contextlib.suppress(SlipstreamError):
                counts[arm.name] = ranks_of(technique.parse(arm.name))
    return counts


def ranks_table(sides: Sequence[RanksSide]) -> Table:
    """Return a table with a row per side; `sides` is not empty."""
    fields: tuple[Field[RanksSide], ...] = (
        Field.of("ranks", lambda side: side.technique),
        Field.number("step: predicted, measured", lambda side: _predicted_and_measured(
            side.predicted_step_ns, side.step_ns, format_duration)),
        Field.number(f"speed-up over {sides[0].technique}", _speedup),
        Field.number("sent by a rank", lambda side: _predicted_and_measured(
            side.predicted_sent_bytes, side.sent_bytes, format_bytes)),
        Field.of("replicas", lambda side: side.replicas),
        Field.number("loss: baseline / ranks", _losses),
    )  # fmt: skip
    notes = [
        "step times are of all ranks together; bytes are predicted without headers and measured "
        "with them (4.6 % of full packets); replicas are compared after every turn; the loss is "
        "the mean over the ranks' own batches",
    ]
    return Table.of(sides, fields, "ranks", notes)


def _speedup(side: RanksSide) -> str:
    if side.speedup is None or side.speedup_interval is None:
        return "-"
    return format_speedup((side.speedup, *side.speedup_interval))


def _losses(side: RanksSide) -> str:
    if side.loss is None:
        return "-"
    return f"{side.loss_as_it_is:.4g} / {side.loss:.4g} after {side.loss_after}"


def _predicted_and_measured(
    predicted: float | None, measured: float, write: Callable[[float], str]
) -> str:
    if not predicted:
        return f"-, {write(measured)}"
    return f"{write(predicted)}, {write(measured)} ({100 * (predicted / measured - 1):+.1f} %)"


def _mean(values: tuple[float, ...]) -> float | None:
    return statistics.fmean(values) if values else None
