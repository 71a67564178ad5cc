"""Tests of the search for the largest batch on simulated heaps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.verbs.batch.tries import Tries, Try, next_size

LIMIT = 1_000_000
Heap = Callable[[int], float]


def search(needs: Heap, guess: int, quantum: int = 1) -> tuple[int, set[int], int]:
    """Return the largest size that ran, the sizes that failed, and the number of tries."""
    start = guess // 8 // quantum * quantum + quantum
    ran, failed = {start: int(needs(start))}, set[int]()
    assert ran[start] <= LIMIT
    size: int | None = guess
    tries = 0
    while size is not None and tries < 40:
        assert size % quantum == 0
        assert size not in ran
        assert size not in failed
        tries += 1
        if needs(size) <= LIMIT:
            ran[size] = int(needs(size))
        else:
            failed.add(size)
        size = next_size(ran, failed, LIMIT, quantum)
    return max(ran), failed, tries


@pytest.mark.parametrize("off", [0.7, 0.9, 0.97, 1.0, 1.02, 1.1, 1.3])
def test_a_wrong_prediction_is_corrected(off: float) -> None:
    def needs(samples: int) -> float:
        return 400_000 + 600 * samples

    largest, failed, tries = search(needs, round(1000 * off))
    assert 1000 / 1.03 <= largest <= 1000
    assert any(abs(size / largest - 1.1) < 0.03 for size in failed)
    assert tries <= 8


@pytest.mark.parametrize("guess", [15, 20, 22, 26])
def test_small_batches_are_found_exactly(guess: int) -> None:
    largest, _, tries = search(lambda samples: 400_000 + 27_000 * samples, guess)
    assert largest == 22
    assert tries <= 8


def test_sizes_are_whole_batches() -> None:
    largest, _, _ = search(lambda samples: 400_000 + 600 * samples, 1104, quantum=24)
    assert largest == 984


def test_finds_a_batch_beyond_a_jump_of_the_heap() -> None:
    """A larger batch fits although a smaller one does not: its tensors are mapped separately."""

    def needs(samples: int) -> float:
        return 300_000 + (1.4 if samples < 8200 else 0.9) * 70 * samples

    # No size in between runs.
    assert needs(7142) <= LIMIT < needs(7150)
    assert needs(8200) <= LIMIT
    largest, _, _ = search(needs, 7618)
    assert largest >= 700_000 / 63 / 1.03


@given(
    fixed=st.floats(0, 0.8), guess=st.integers(40, 4000), step=st.floats(0, 0.03),
    at=st.floats(0.5, 1.5), quantum=st.sampled_from([1, 4]),
)  # fmt: skip
def test_the_largest_runs_and_a_little_more_does_not(
    fixed: float, guess: int, step: float, at: float, quantum: int
) -> None:
    def needs(samples: int) -> float:
        line = LIMIT * (fixed + (1 - fixed) * samples / 1000)
        return line + LIMIT * step * (samples > at * 1000)

    guess = guess // quantum * quantum
    largest, failed, tries = search(needs, min(guess, 7000))
    assert needs(largest) <= LIMIT
    above = [size for size in failed if size > largest]
    assert min(above) <= max(largest * 1.03, largest + quantum)
    assert tries <= 14
    assert needs(math.ceil(1.1 * largest / quantum) * quantum) > LIMIT


class NoisyHeap:
    """Processes whose need varies by 1 %; half of the limit is fixed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def needs(self, samples: int) -> list[int]:
        """Return the needs of three processes; empty if one exceeds the limit."""
        line = 0.5 * LIMIT * (1 + samples / 1000)
        found = (line * self._rng.normal(1, 0.01, 3)).astype(int).tolist()
        return found if max(found) <= LIMIT else []


def largest(seed: int) -> int:
    luck = NoisyHeap(seed)
    tries = Tries({200: 600_000}, LIMIT)
    size: int | None = 900
    while size is not None and len(tries) < 11:
        tries.add(size, luck.needs(size))
        size = tries.next_size(1)
    return max(try_.samples for try_ in tries.judged() if try_.ran)


def test_the_result_fits_again_and_a_tenth_more_does_not() -> None:
    found = [largest(seed) for seed in range(60)]
    again = [bool(NoisyHeap(1000 + seed).needs(size)) for seed, size in enumerate(found)]
    more = [
        bool(NoisyHeap(2000 + seed).needs(math.ceil(1.1 * size))) for seed, size in enumerate(found)
    ]
    assert np.mean(again) >= 0.8
    assert np.mean(more) <= 0.1
    assert 0.93 * 1000 <= np.median(found) <= 1000


def test_a_size_that_ran_by_chance_does_not_count() -> None:
    tries = Tries({100: 500_000}, LIMIT)
    tries.add(150, [960_000, 970_000, 999_000])
    assert tries.spread == pytest.approx(0.0208, abs=1e-3)
    assert tries.judged() == [Try(100, 500_000), Try(150, 999_000, room=False)]
    # Sizes without any spread show that it was chance.
    for size in (110, 120, 130):
        tries.add(size, [5000 * size] * 3)
    assert tries.spread == pytest.approx(0.0104, abs=1e-3)
    assert [try_.ran for try_ in tries.judged()] == [True, True, True, True, True]
    tries.add(160, [])
    assert tries.judged()[-1] == Try(160, 0)
    assert 150 < (tries.next_size(1) or 0) < 160
