"""T* is a lower bound on all integer schedules of small cases, found by exhaustive search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from slipstream.engines.trials import TrialSet, bound_s


def fastest_of_all(trials: TrialSet, devices: int) -> float:
    """Return the minimum makespan of all schedules that change only when trials end.

    At every end, try all assignments of whole widths or shared devices to the remaining trials;
    resizing is free. Takes exponential time.
    """
    m, d = trials.rates.shape
    best = [np.inf]

    def assignments(remaining: list[int], room: int) -> list[tuple[tuple[int, ...], ...]]:
        """Partition subsets of `left` into groups of 1 (wide) or more (sharing a device)."""
        found = []
        for labels in itertools.product(range(-1, room), repeat=len(remaining)):
            groups: dict[int, list[int]] = {}
            for i, label in zip(remaining, labels, strict=True):
                if label >= 0:
                    groups.setdefault(label, []).append(i)
            partition = tuple(sorted(tuple(group) for group in groups.values()))
            if partition and list(groups) == sorted(groups):
                found.append(partition)
        return list(dict.fromkeys(found))

    def go(work: tuple[float, ...], now: float) -> None:
        remaining = [i for i in range(m) if work[i] > 1e-9]
        if not remaining:
            best[0] = min(best[0], now)
            return
        if now + max(work[i] / trials.rates[i].max() for i in remaining) >= best[0]:
            return
        for groups in assignments(remaining, devices):
            alone = [group[0] for group in groups if len(group) == 1]
            spare = devices - len(groups)
            for widths in itertools.product(range(1, d + 1), repeat=len(alone)):
                if sum(widths) - len(alone) > spare:
                    continue
                rate = dict(zip(alone, (trials.rates[i, w - 1] for i, w in zip(
                    alone, widths, strict=True)), strict=True))  # fmt: skip
                for group in groups:
                    if len(group) > 1:
                        load = sum(trials.utilisation[i] for i in group)
                        rate |= dict.fromkeys(group, min(1.0, 1.0 / load))
                step = min(work[i] / r for i, r in rate.items())
                go(tuple(w - step * rate.get(i, 0.0) for i, w in enumerate(work)), now + step)

    go(tuple(trials.work_s), 0.0)
    return best[0]


def test_no_schedule_is_below_the_bound() -> None:
    for seed in range(500):
        rng = np.random.default_rng(seed)
        m, devices = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        work_s, gamma, utilisation = (
            rng.lognormal(0, 0.6, m), rng.uniform(0.0, 0.4, m), rng.uniform(0.3, 1.0, m)
        )  # fmt: skip
        trials = TrialSet.of(work_s, gamma, utilisation, max_width=3)
        assert bound_s(trials, devices) <= fastest_of_all(trials, devices) * (1 + 1e-9), seed


@pytest.mark.parametrize(("devices", "k"), [(1, 1), (3, 2), (8, 5)])
def test_equal_trials_with_perfect_scaling_meet_the_bound(devices: int, k: int) -> None:
    m = k * devices
    trials = TrialSet.of(np.full(m, 7.0), np.zeros(m), np.ones(m))
    assert bound_s(trials, devices) == pytest.approx(7.0 * k)
