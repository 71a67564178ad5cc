"""Measure whether a candidate is cheaper than a baseline: `compare` and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.measure.arms import Arm, CallableArm
from slipstream.measure.checks import QualityCheck, checks_of
from slipstream.measure.claims import (
    candidates,
    claim_of,
    claims,
    headline,
    is_derived,
    paired,
    ranks,
    ratio_between,
)
from slipstream.measure.launches import MAX_LAUNCHES
from slipstream.measure.quality import Outcomes, compare_quality, require_quality
from slipstream.measure.records import (
    AUTO,
    Claim,
    Environment,
    Event,
    Experiment,
    ExperimentSettings,
    Metric,
    PredictionRecord,
    Verdict,
)
from slipstream.measure.runner import Progress, RunPlan, run
from slipstream.units import parse_duration_ns

if TYPE_CHECKING:
    from slipstream.measure.store import Store
    from slipstream.tables import Table

# Aliases of metrics, and their names in the store.
_ALIASES = {"peak_mem": "peak_memory", "memory": "peak_memory", "time": "wall"}


@dataclass(frozen=True)
class Comparison:
    """A finished experiment and its claims."""

    experiment: Experiment
    claims: tuple[Claim, ...]

    @classmethod
    def of(cls, experiment: Experiment) -> Comparison:
        """Compute the claims of a recorded experiment."""
        return cls(experiment, claims(experiment))

    def _repr_html_(self) -> str:
        from slipstream.measure.page import comparison_fragment

        return comparison_fragment(self.experiment, self.claims)

    @property
    def quality(self) -> dict[str, QualityCheck]:
        """Quality checks of the candidates that have one, by name."""
        return checks_of(self.experiment.events)

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """Verdicts on all candidates, by name."""
        return {claim.arm: claim.verdict for claim in headline(self.claims)}

    @property
    def verdict(self) -> Verdict:
        """The verdict on the only candidate.

        Raises:
            InvalidArgumentError: There are several candidates; use `verdicts`.
        """
        if len(self.verdicts) != 1:
            raise InvalidArgumentError(
                "verdict", f"there are {len(self.verdicts)} candidates", remedy="use .verdicts"
            )
        return next(iter(self.verdicts.values()))

    def ratio(self, arm: str, other: str | None = None, metric: Metric | None = None) -> Claim:
        """Return the claim about `arm` against `other` (default: the baseline).

        The metric defaults to the carrying one. The interval of a ratio between two candidates is
        not corrected for selecting the pair.

        Raises:
            UnknownNameError: There is no such arm, or no claim about the metric.
        """
        settings = self.experiment.settings
        other = other or settings.baseline
        names = [settings.baseline, *candidates(self.experiment)]
        for name in (arm, other):
            if name not in names:
                raise UnknownNameError("arm", name, names)
        metric = _ALIASES.get(metric, metric) if metric else None
        about = [c for c in self.claims if c.arm == arm and c.baseline == other]
        for claim in about:
            if claim.carries if metric is None else claim.metric == metric:
                return claim
        if other == settings.baseline:
            raise UnknownNameError("metric", metric or "?", [c.metric for c in about])
        return self._between(arm, other, metric or headline(self.claims)[0].metric)

    def ranks(self) -> dict[str, tuple[int, int]]:
        """Return the best and worst rank of each arm in the carrying metric; 1 is the cheapest."""
        return ranks(self.experiment)

    def _between(self, arm: str, other: str, metric: Metric) -> Claim:
        interval = ratio_between(self.experiment, metric, arm, other)
        values = paired(self.experiment, metric, arm, other)
        blocks = 0 if values is None else len(values[0])
        verdict = Verdict.INCONCLUSIVE
        if interval.excludes(1.0):
            verdict = Verdict.FASTER if interval.estimate < 1 else Verdict.SLOWER
        reason = "selected from several pairs; not corrected for that"
        claim = claim_of(self.experiment, metric, arm, interval, verdict, blocks, reason)
        return replace(claim, baseline=other, detectable=float("nan"))

    def save(self, store: Store | Path | str | None = None) -> str:
        """Save the experiment in a results store (default: the project's) and return its id.

        Raises:
            StoreError: The store cannot be written.
        """
        from slipstream.measure.store import Store

        if store is None or isinstance(store, (str, Path)):
            with Store(store) as opened:
                return opened.save(self.experiment, self.claims)
        return store.save(self.experiment, self.claims)

    def table(self) -> Table:
        """Return a table of the claims, for a terminal, Markdown or HTML."""
        from slipstream.measure.render import comparison_table

        return comparison_table(self.experiment, self.claims)

    def __str__(self) -> str:
        return self.table().to_markdown()


def compare(
    arms: Mapping[str, Callable[[], object] | Arm] | Sequence[Arm],
    *,
    metrics: Sequence[Metric] = ("wall", "cpu"),
    target: float = 0.02,
    budget: str | float = "60s",
    baseline: str | None = None,
    primary: Metric | None = None,
    primary_because: str = "",
    level: float = 0.95,
    equivalence: float = 0.02,
    seed: int = 0,
    stop_when_decided: bool = False,
    launches: int = MAX_LAUNCHES,
    title: str = "",
    timeout: str | float | None = None,
    changes_numerics: Sequence[str] = (),
    quality: Mapping[str, Outcomes] | None = None,
    checks: Sequence[QualityCheck] = (),
    predictions: Mapping[str, PredictionRecord] | None = None,
    environment: Environment | None = None,
    plan: RunPlan | None = None,
    store: Store | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Comparison:
    """Measure the arms in paired, interleaved blocks until the interval is narrow enough.

    Args:
        arms: Name -> function without arguments (or an `Arm`); the first is the baseline unless
            `baseline` names another.
        metrics: ``"wall"`` and ``"cpu"`` are always recorded; ``"peak_mem"`` is the increase of a
            call over the resting process; ``"wall_p99"`` and ``"throughput"`` are derived.
        target: Relative width of the ratio's interval below which to stop.
        budget: Time after which no further block begins: ``"60s"``, or seconds.
        primary: Metric that decides; by default wall or CPU time depending on the data
            (see `claims.carrier`), or the first of `metrics` unless both are requested.
        primary_because: Reason for `primary`, for the report.
        launches: Maximum number of times to start arms in separate processes within the budget,
            so that the interval includes variation between processes.
        changes_numerics: Arms whose results differ in value; they need `quality` or a check.
        quality: Arm -> whether each item is right, the same items for all.
        checks: Other quality checks of candidates; an arm whose quality was lost or not checked
            is not called faster.
        timeout: Time limit per sample, after which an arm is stopped; default 10 minutes.
        store: Store that records the running experiment, block by block.

    Raises:
        InvalidArgumentError: There is only one arm or no budget, arms return different shapes, or
            a speed claim needs quality outcomes.
        ArmFailedError: The baseline or every candidate failed.
    """
    listed = _arms(arms)
    names = [arm.name for arm in listed]
    first = baseline or (names[0] if names else "")
    requested = [_ALIASES.get(metric, metric) for metric in metrics]
    settings = ExperimentSettings(
        baseline=first,
        primary=_primary(primary, requested),
        primary_because=primary_because if primary is not None else "",
        target_rel_width=target,
        budget_s=seconds(budget, "budget"),
        level=level,
        equivalence=equivalence,
        seed=seed,
        derived=tuple(m for m in requested if is_derived(m)),
        stop_when_decided=stop_when_decided,
        launches=launches,
    )
    if not 0 < level < 1:
        raise InvalidArgumentError(
            "level", f"{level} is not between 0 and 1", remedy="for example 0.95"
        )
    for name in changes_numerics:
        if name not in names:
            raise UnknownNameError("arm", name, names)
    outcomes = dict(quality or {})
    require_quality(changes_numerics, outcomes, first, [check.arm for check in checks])
    plan = plan or RunPlan()
    plan = replace(
        plan,
        peak_memory=plan.peak_memory or "peak_memory" in requested,
        timeout_s=plan.timeout_s if timeout is None else seconds(timeout, "timeout"),
    )
    _check_shapes(listed, plan.timeout_s)
    sink = store.sink() if store is not None else None
    experiment = run(
        listed,
        settings,
        title=title,
        environment=environment,
        plan=plan,
        sink=sink,
        progress=progress,
        events=[*_quality_events(outcomes, first), *(check.to_event() for check in checks)],
        predictions=predictions,
    )
    if sink is not None and sink.recording is not None:
        experiment = replace(experiment, experiment_id=sink.recording.experiment_id)
    return Comparison.of(experiment)


def _arms(arms: Mapping[str, Callable[[], object] | Arm] | Sequence[Arm]) -> list[Arm]:
    if not isinstance(arms, Mapping):
        return list(arms)
    listed: list[Arm] = []
    for name, arm in arms.items():
        if isinstance(arm, Arm):
            if arm.name != name:
                raise InvalidArgumentError("arms", f"the arm under '{name}' is called '{arm.name}'")
            listed.append(arm)
        else:
            listed.append(CallableArm(name, arm))
    return listed


def _check_shapes(arms: Sequence[Arm], timeout_s: float) -> None:
    """Call every function once; raise InvalidArgumentError if the results differ in shape.

    The runner reports arms that raise, with block and phase.
    """
    first: tuple[str, object] | None = None
    for arm in arms:
        shape = arm.result_shape(timeout_s) if isinstance(arm, CallableArm) else None
        if shape is None:
            continue
        if first is not None and shape != first[1]:
            raise InvalidArgumentError(
                "arms",
                f"'{first[0]}' and '{arm.name}' return different shapes: {first[1]}, {shape}",
                remedy="compare the same work; return None where shapes may differ",
            )
        first = first or (arm.name, shape)


def _primary(primary: Metric | None, requested: Sequence[Metric]) -> Metric:
    if primary is not None:
        return _ALIASES.get(primary, primary)
    if not requested:
        raise InvalidArgumentError(
            "metrics", "no metric is given", remedy='for example ["wall", "cpu"]'
        )
    return AUTO if {"wall", "cpu"} <= set(requested) else requested[0]


def seconds(value: str | float, argument: str) -> float:
    """Parse a duration, ``"60s"`` or a number of seconds, into seconds.

    Raises:
        InvalidArgumentError: The duration is not positive and finite.
    """
    duration = parse_duration_ns(value, argument) / 1e9 if isinstance(value, str) else float(value)
    if not 0 < duration < float("inf"):
        raise InvalidArgumentError(
            argument, f"{value} is not a positive duration", remedy="for example 60s"
        )
    return duration


def _quality_events(outcomes: Mapping[str, Outcomes], baseline: str) -> list[Event]:
    if not outcomes or baseline not in outcomes:
        return []
    return [
        Event(0, "quality", asdict(compare_quality(arm, outcomes[baseline], of_arm)))
        for arm, of_arm in outcomes.items()
        if arm != baseline
    ]
