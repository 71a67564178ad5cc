"""The one way a bench takes times and ratios: `slipstream.measure`'s paired runner.

    with one_thread():
        taken = paired({"torch": theirs, "ours": ours}, blocks=30)
    yield taken.ratio("torch", "ours").at_least("over torch", 12.0, detail="4 M numbers")

Arms run in blocks, every arm once a block in random order; the first arm runs against itself in
some of the blocks (the A/A guard), and the gate says how busy the machine was. A row made of a
ratio carries all of that as data, and is not judged where the first arm differs from itself.
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

# A baseline is said to differ from itself where so many of a row's guards saying so would come of
# chance in fewer than one row of this many.
_BY_CHANCE = 0.05


@dataclass(frozen=True)
class Ratio:
    """How many times as long one arm takes as another.

    Attributes:
        value: median of the blocks' ratios.
        low, high: its 95 % interval; 0 and infinity below six blocks.
        first, third: quartiles of the blocks' ratios.
        n: blocks.
        clock: CPU time, or wall time.
        guard: the baseline's time over its own in the guard's blocks; None without such blocks.
        trusted: False where the guard's 99 % interval leaves 1 out, None where there were too few
            blocks to say.
        gate: blocks by what the machine was: green, amber, red.
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
        """As a row carries it; an interval's end that is not known is None."""
        return {
            "ratio": self.value, "low": self.low or None,
            "high": self.high if np.isfinite(self.high) else None,
            "quartiles": [self.first, self.third], "n": self.n, "clock": self.clock,
            "guard": self.guard, "trusted": self.trusted, "gate": dict(self.gate),
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.value:.2f} (quartiles {self.first:.2f} to {self.third:.2f})"

    def at_least(self, bar: str, target: float, *, detail: str = "") -> Bar:
        """A row that holds when the ratio reaches `target`, and is not judged if not trusted."""
        return self._row(at_least(bar, self.value, target, "x", n=self.n), detail)

    def at_most(self, bar: str, target: float, *, detail: str = "") -> Bar:
        """A row that holds when the ratio does not exceed `target`; as `at_least`."""
        return self._row(at_most(bar, self.value, target, "x", n=self.n), detail)

    def reported(self, bar: str, *, detail: str = "") -> Bar:
        """A row without a bar."""
        return self._row(Bar(bar, self.value, "x", "reported", None, self.n), f"no bar; {detail}")

    def _row(self, row: Bar, detail: str) -> Bar:
        spread = f"quartiles {self.first:.2f} to {self.third:.2f}"
        known = self.low > 0 and bool(np.isfinite(self.high))
        row = replace(row, detail="; ".join(filter(None, (detail, spread))))
        if known:
            row = replace(row, low=self.low, high=self.high)
        return replace(guarded(row, {row.bar: self}), data=self.data)


@dataclass(frozen=True)
class Paired:
    """Arms that were run against each other.

    Attributes:
        experiment: everything recorded.
        clock: what times are told in.
    """

    experiment: Experiment
    clock: Clock

    @property
    def arms(self) -> tuple[str, ...]:
        """Names, the baseline first."""
        return tuple(arm.name for arm in self.experiment.arms)

    def ratio(self, slow: str, fast: str) -> Ratio:
        """How many times as long `slow` takes as `fast`."""
        interval = claims.ratio_between(self.experiment, self.clock, slow, fast)
        times = claims.paired(self.experiment, self.clock, slow, fast)
        assert times is not None  # or there were no interval
        ratios = times[0] / times[1]
        first, third = np.quantile(ratios, (0.25, 0.75))
        guard = claims.guard_claim(self.experiment, self.clock)
        known = guard is not None and guard.low > 0 and guard.high < np.inf
        return Ratio(
            interval.estimate, interval.low, interval.high, float(first), float(third), len(ratios),
            self.clock, None if guard is None else guard.ratio,
            guard.low <= 1.0 <= guard.high if known and guard is not None else None,
            gate_states(self.experiment),
        )  # fmt: skip

    def times_s(self, name: str) -> Floats:
        """Seconds of a call of one arm, float64 [blocks]."""
        return self.experiment.series[name, self.clock, Phase.MEASURE].values / 1e9

    def median_s(self, name: str) -> float:
        """The median of `times_s`."""
        return float(np.median(self.times_s(name)))

    def __str__(self) -> str:
        return ", ".join(f"{name} {1e3 * self.median_s(name):.4g}" for name in self.arms) + " ms"

    def minimum_s(self, name: str) -> float:
        """The minimum of `times_s`: what the arm takes undisturbed."""
        return float(self.times_s(name).min())


def on_cuda(bar: Bar) -> Bar:
    """The row as one of the CUDA device that is there."""
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
        arms: by name, functions of this process or arms of any kind (as a child process's, which
            bring their own CPU time); the first is the baseline of the A/A guard,
            which runs it twice in some blocks: the cheapest, where there is a choice.
        clock: CPU time of this thread, which a busy machine disturbs least; or wall time, for
            what computes on several threads or waits.
        blocks: how many, if `budget_s` allows.
        settle_s: an arm is called until it is stationary, once at least and for so long at most.
        budget_s: seconds after which no further block begins; a sample holds as many calls as
            leave room for 40 blocks.
        warm: every sample comes behind an uncounted call, so that caches hold what the arm left.
        spoil: called before every sample, not counted: so that caches hold nothing of any arm.
        once: a sample is one call, however short.

    Raises:
        ArmFailedError: an arm raised.
    """
    listed = [
        one
        if isinstance(one, Arm)
        else CallableArm(
            name,
            one,
            own_thread=clock == "cpu",
            prepare=one if warm else spoil,
            repeatable=not once,
        )
        for name, one in arms.items()
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
    """Seconds of each call of one function that has no other to be compared with, [repeats].

    Args:
        settle: calls before, which are not counted.
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
    """An arm that tells its function the number of the call: to take another batch each time."""
    numbers = itertools.count()
    return lambda: function(next(numbers))


def guarded(row: Bar, ratios: Mapping[str, Ratio]) -> Bar:
    """A row over several ratios: with their data, and not judged where baselines differ.

    A guard errs once in a hundred times, so that of many ratios some may say so.
    """
    from scipy.stats import binom

    broken = [name for name, ratio in ratios.items() if ratio.trusted is False]
    data = {**row.data, "ratios": {name: ratio.data for name, ratio in ratios.items()}}
    if not broken or binom.sf(len(broken) - 1, len(ratios), 1 - claims.GUARD_LEVEL) > _BY_CHANCE:
        return replace(row, data=data)
    why = "not judged: the baseline differs from itself"
    why += f" ({', '.join(broken)})" if len(ratios) > 1 else ""
    return replace(row, holds=None, detail="; ".join(filter(None, (why, row.detail))), data=data)


@contextlib.contextmanager
def one_thread(*, gradients: bool = True) -> Iterator[None]:
    """Torch and the libraries of linear algebra compute on one thread here.

    Args:
        gradients: False where torch shall record none.
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
    """Captured once a process."""
    from slipstream.measure.environment import capture

    return capture()


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """That many processes beside this one that never rest."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2)
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()
