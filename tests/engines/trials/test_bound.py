"""T* is below every schedule: against all integer schedules of small cases, by search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from slipstream.engines.trials import TrialSet, bound_s


def fastest_of_all(trials: TrialSet, devices: int) -> float:
    """The least makespan over all schedules that change at ends of trials only.

    Every assignment of whole widths, or of shared devices, to the trials that are left is tried at
    every end; resizing costs nothing. Plain, and exponential.
    """
    m, d = trials.rates.shape
    best = [np.inf]

    def assignments(left: list[int], room: int) -> list[tuple[tuple[int, ...], ...]]:
        """Partitions of some of `left` into groups of 1 (wide) or more (a shared device)."""
        found = []
        for labels in itertools.product(range(-1, room), repeat=len(left)):
            groups: dict[int, list[int]] = {}
            for i, label in zip(left, labels, strict=True):
                if label >= 0:
                    groups.setdefault(label, []).append(i)
            made = tuple(sorted(tuple(one) for one in groups.values()))
            if made and list(groups) == sorted(groups):
                found.append(made)
        return list(dict.fromkeys(found))

    def go(work: tuple[float, ...], now: float) -> None:
        left = [i for i in range(m) if work[i] > 1e-9]
        if not left:
            best[0] = min(best[0], now)
            return
        if now + max(work[i] / trials.rates[i].max() for i in left) >= best[0]:
            return
        for groups in assignments(left, devices):
            alone = [one[0] for one in groups if len(one) == 1]
            spare = devices - len(groups)
            for widths in itertools.product(range(1, d + 1), repeat=len(alone)):
                if sum(widths) - len(alone) > spare:
                    continue
                rate = dict(zip(alone, (trials.rates[i, w - 1] for i, w in zip(
                    alone, widths, strict=True)), strict=True))  # fmt: skip
                for one in groups:
                    if len(one) > 1:
                        load = sum(trials.utilisation[i] for i in one)
                        rate |= dict.fromkeys(one, min(1.0, 1.0 / load))
                step = min(work[i] / r for i, r in rate.items())
                go(tuple(w - step * rate.get(i, 0.0) for i, w in enumerate(work)), now + step)

    go(tuple(trials.work_s), 0.0)
    return best[0]


def test_no_schedule_is_below_the_bound() -> None:
    for seed in range(500):
        below(seed)


def below(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, devices = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    trials = TrialSet.of(
        rng.lognormal(0, 0.6, m), rng.uniform(0.0, 0.4, m), rng.uniform(0.3, 1.0, m), max_width=3
    )
    assert bound_s(trials, devices) <= fastest_of_all(trials, devices) * (1 + 1e-9)


@pytest.mark.parametrize(("devices", "k"), [(1, 1), (3, 2), (8, 5)])
def test_equal_trials_that_scale_and_share_nothing_meet_it(devices: int, k: int) -> None:
    m = k * devices
    trials = TrialSet.of(np.full(m, 7.0), np.zeros(m), np.ones(m))
    assert bound_s(trials, devices) == pytest.approx(7.0 * k)
