"""The search for the largest batch, on heaps that are known: whatever lines say, what it ends with
runs, and what is little larger does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.verbs._batch_tries import next_size

LIMIT = 1_000_000
Heap = Callable[[int], float]


def search(needs: Heap, guess: int, quantum: int = 1) -> tuple[int, set[int], int]:
    """The largest that ran, what did not, and how many were tried."""
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

    most, failed, tries = search(needs, round(1000 * off))
    assert 1000 / 1.03 <= most <= 1000
    assert any(abs(size / most - 1.1) < 0.03 for size in failed)
    assert tries <= 8


@pytest.mark.parametrize("guess", [15, 20, 22, 26])
def test_a_few_samples_are_found_to_the_last(guess: int) -> None:
    most, _, tries = search(lambda samples: 400_000 + 27_000 * samples, guess)
    assert most == 22
    assert tries <= 8


def test_sizes_are_whole_batches() -> None:
    most, _, _ = search(lambda samples: 400_000 + 600 * samples, 1104, quantum=24)
    assert most == 984


def test_a_heap_that_jumps_down_hides_nothing() -> None:
    """A larger batch fits though a smaller does not: its tensors get pages of their own."""

    def needs(samples: int) -> float:
        return 300_000 + (1.4 if samples < 8200 else 0.9) * 70 * samples

    # From the first to the second of these nothing runs.
    assert needs(7142) <= LIMIT < needs(7150)
    assert needs(8200) <= LIMIT
    most, _, _ = search(needs, 7618)
    assert most >= 700_000 / 63 / 1.03


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
    most, failed, tries = search(needs, min(guess, 7000))
    assert needs(most) <= LIMIT
    above = [size for size in failed if size > most]
    assert min(above) <= max(most * 1.03, most + quantum)
    assert tries <= 14
    assert needs(math.ceil(1.1 * most / quantum) * quantum) > LIMIT
