"""Times and ratios of benches, measured by the paired runner of `slipstream.measure`.

    with one_thread():
        runs = paired({"torch": theirs, "ours": ours}, blocks=30)
    yield runs.ratio("torch", "ours").at_least("over torch", 12.0, detail="4 M numbers")

Arms run in blocks, every arm once per block in random order. In some blocks the first arm runs
against itself (the A/A guard), and the gate records how busy the machine was. A row with a ratio
carries all of that as data, and is not judged if the first arm differs from itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from slipstream.measure import Arm, CallableArm, ExperimentSettings, RunPlan, claims, run
from slipstream.measure.records import Environment, Experiment, Phase
from slipstream.measure.render import gate_states
from slipstream.measure.statistics import Floats
from slipstream_bench.rows import Bar, at_least, at_most

Clock = Literal["cpu", "wall"]
Function = Callable[[], object]

# A row is not judged if this number of failing guards, among all of its guards, has a lower
# probability than this by chance.
_BY_CHANCE = 0.05


@dataclass(frozen=True)
class Ratio:
    """Ratio of the times of two arms.

    Attributes:
        value: median of the blocks' ratios.
        low, high: its 95 % interval; 0 and infinity with fewer than six blocks.
        first, third: quartiles of the blocks' ratios.
        n: number of blocks.
        clock: CPU time, or wall time.
        guard: time of the baseline over its own time in the guard's blocks; None without such
            blocks.
        trusted: False if the guard's 99 % interval excludes 1, None if there were too few blocks to
            decide.
        gate: number of blocks by state of the machine: green, amber, red.
    """

    value: float
    low: float
    high: float
    first: float
    third: float
    n: int
    clock: Clock
    guard: float | None
    trusted: bool | None
    gate: Mapping[str, int]

    @property
    def data(self) -> dict[str, Any]:
        """The data of a row; an unknown end of the interval is None."""
        return {
            "ratio": self.value, "low": self.low or None,
            "high": self.high if np.isfinite(self.high) else None,
            "quartiles": [self.first, self.third], "n": self.n, "clock": self.clock,
            "guard": self.guard, "trusted": self.trusted, "gate": dict(self.gate),
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.value:.2f} (quartiles {self.first:.2f} to {self.third:.2f})"

    def at_least(self, bar: str, target: float, *, detail: str = "") -> Bar:
        """Return a row that holds if the ratio reaches `target`; not judged if not trusted."""
        return self._row(at_least(bar, self.value, target, "x", n=self.n), detail)

    def at_most(self, bar: str, target: float, *, detail: str = "") -> Bar:
        """Return a row that holds if the ratio is at most `target`; not judged if not trusted."""
        return self._row(at_most(bar, self.value, target, "x", n=self.n), detail)

    def reported(self, bar: str, *, detail: str = "") -> Bar:
        """Return a row without a target."""
        return self._row(Bar(bar, self.value, "x", "reported", None, self.n), f"no bar; {detail}")

    def _row(self, row: Bar, detail: str) -> Bar:
        spread = f"quartiles {self.first:.2f} to {self.third:.2f}"
        bounded = self.low > 0 and bool(np.isfinite(self.high))
        row = replace(row, detail="; ".join(filter(None, (detail, spread))))
        if bounded:
            row = replace(row, low=self.low, high=self.high)
        return replace(guarded(row, {row.bar: self}), data=self.data)


@dataclass(frozen=True)
class Paired:
    """Results of arms that ran against each other.

    Attributes:
        experiment: everything recorded.
        clock: the clock of the times.
    """

    experiment: Experiment
    clock: Clock

    @property
    def arms(self) -> tuple[str, ...]:
        """Names, the baseline first."""
        return tuple(arm.name for arm in self.experiment.arms)

    def ratio(self, slow: str, fast: str) -> Ratio:
        """Return the time of `slow` over the time of `fast`."""
        interval = claims.ratio_between(self.experiment, self.clock, slow, fast)
        times = claims.paired(self.experiment, self.clock, slow, fast)
        assert times is not None  # or there were no interval
        ratios = times[0] / times[1]
        first, third = np.quantile(ratios, (0.25, 0.75))
        guard = claims.guard_claim(self.experiment, self.clock)
        bounded = guard is not None and guard.low > 0 and guard.high < np.inf
        return Ratio(
            interval.estimate, interval.low, interval.high, float(first), float(third), len(ratios),
            self.clock, None if guard is None else guard.ratio,
            guard.low <= 1.0 <= guard.high if bounded and guard is not None else None,
            gate_states(self.experiment),
        )  # fmt: skip

    def times_s(self, name: str) -> Floats:
        """Return seconds per call of an arm, float64 [blocks]."""
        return self.experiment.series[name, self.clock, Phase.MEASURE].values / 1e9

    def median_s(self, name: str) -> float:
        """The median of `times_s`."""
        return float(np.median(self.times_s(name)))

    def __str__(self) -> str:
        return ", ".join(f"{name} {1e3 * self.median_s(name):.4g}" for name in self.arms) + " ms"

    def minimum_s(self, name: str) -> float:
        """Return the minimum of `times_s`, the time of an undisturbed call."""
        return float(self.times_s(name).min())


def on_cuda(bar: Bar) -> Bar:
    """Return the row with this machine's CUDA device."""
    import torch

    return replace(bar, device=torch.cuda.get_device_name())


def paired(
    arms: Mapping[str, Function | Arm],
    *,
    clock: Clock = "cpu",
    blocks: int = 15,
    settle_s: float = 0.2,
    budget_s: float = 20.0,
    warm: bool = False,
    spoil: Function | None = None,
    once: bool = False,
) -> Paired:
    """Run arms against each other in blocks.

    Args:
        arms: by name, functions of this process or arms of any kind (those of child processes
            measure their CPU time). The first is the baseline of the A/A guard, which runs it twice
            in some blocks; choose the cheapest.
        clock: CPU time of this thread, which a busy machine disturbs least; or wall time, for
            arms that compute on several threads or wait.
        blocks: number of blocks, if `budget_s` allows.
        settle_s: maximum time of warm-up calls of each arm, which end when its time is stationary.
        budget_s: seconds after which no further block begins; a sample has as many calls as
            allow 40 blocks.
        warm: call the arm before every sample without timing it, so that caches hold its data.
        spoil: called before every sample without timing it, to clear the caches.
        once: a sample is one call, even if it is short.

    Raises:
        RuntimeError: an arm raised.
    """
    listed = [
        arm
        if isinstance(arm, Arm)
        else CallableArm(
            name,
            arm,
            own_thread=clock == "cpu",
            prepare=arm if warm else spoil,
            repeatable=not once,
        )
        for name, arm in arms.items()
    ]
    settings = ExperimentSettings(next(iter(arms)), primary=clock, budget_s=budget_s, looks=())
    plan = RunPlan(
        minimum_warmup_s=0.0, maximum_warmup_s=settle_s, maximum_blocks=blocks, red_factor=1.0
    )
    experiment = run(listed, settings, environment=_environment(), plan=plan)
    failed = [event for event in experiment.events if event.kind == "failed"]
    if failed:
        raise RuntimeError(f"'{failed[0].detail['arm']}' failed: {failed[0].detail['what']}")
    return Paired(experiment, clock)


def times_s(
    function: Function, repeats: int = 1, *, clock: Clock = "cpu", settle: int = 1
) -> Floats:
    """Return the seconds of each call of one function, [repeats].

    Args:
        settle: number of warm-up calls.
    """
    arm = CallableArm("it", function, own_thread=clock == "cpu")
    arm.open(None)
    try:
        for _ in range(settle):
            function()
        return np.array([arm.sample(1, None)[clock] for _ in range(repeats)]) / 1e9
    finally:
        arm.close()


def numbered(function: Callable[[int], object]) -> Function:
    """Return an arm that passes the number of the call, for example to vary the batch."""
    numbers = itertools.count()
    return lambda: function(next(numbers))


def guarded(row: Bar, ratios: Mapping[str, Ratio]) -> Bar:
    """Add the data of several ratios to a row, which is not judged if baselines differ.

    A guard errs once in a hundred times, so some of many ratios may fail by chance.
    """
    from scipy.stats import binom

    broken = [name for name, ratio in ratios.items() if ratio.trusted is False]
    data = {**row.data, "ratios": {name: ratio.data for name, ratio in ratios.items()}}
    if not broken or binom.sf(len(broken) - 1, len(ratios), 1 - claims.GUARD_LEVEL) > _BY_CHANCE:
        return replace(row, data=data)
    reason = "not judged: the baseline differs from itself"
    reason += f" ({', '.join(broken)})" if len(ratios) > 1 else ""
    return replace(row, holds=None, detail="; ".join(filter(None, (reason, row.detail))), data=data)


@contextlib.contextmanager
def one_thread(*, gradients: bool = True) -> Iterator[None]:
    """Limit torch and the linear algebra libraries to one thread.

    Args:
        gradients: whether torch records gradients.
    """
    import torch
    from threadpoolctl import threadpool_limits

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1), torch.set_grad_enabled(gradients and torch.is_grad_enabled()):
            yield
    finally:
        torch.set_num_threads(threads)


@functools.cache
def _environment() -> Environment:
    """Return the environment, captured once per process."""
    from slipstream.measure.environment import capture

    return capture()


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Run `count` processes that use a whole core each."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
