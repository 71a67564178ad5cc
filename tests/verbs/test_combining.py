"""Tests of the search over combinations."""

from __future__ import annotations

import time
from collections.abc import Sequence

from slipstream.technique import Quality, QualityKind, combination_name, parse
from slipstream.verbs.combining import Combination, joined, search_combinations
from slipstream.verbs.results import Predicted

PARTS = [
    parse(text) for text in
    ("amp:bf16", "channels_last", "fused_optimizer:fused", "threads:1", "threads:2", "allocator")
]  # fmt: skip


def product(parts: Combination) -> Predicted:
    """Each part saves a tenth of the rest; threads:2 saves nothing with others."""
    ratio = 0.9 ** len(parts) * (1.2 if parse("threads:2")[0] in parts else 1.0)
    return Predicted(
        combination_name(parts), 1e6, 1e6 * ratio, ratio, ratio, ratio, memory=(100, 100),
        quality=Quality(QualityKind.EXACT, "made up"), techniques=parts,
    )  # fmt: skip


def test_combinations_of_many_parts_are_found() -> None:
    requested: list[Combination] = []

    def ask(combinations: Sequence[Combination]) -> list[Predicted]:
        requested.extend(combinations)
        return [product(combination) for combination in combinations]

    pairs = [joined(first, second) for first in PARTS for second in PARTS]
    grown = [combination for combination in (*PARTS, *pairs) if combination is not None]
    predictions = {combination: product(combination) for combination in dict.fromkeys(grown)}
    found, size = search_combinations(PARTS, predictions, set(predictions), ask, lambda line: None)
    # Five techniques, of which one has two settings.
    assert size == 2 * 2 * 2 * 3 * 2 - 1
    best = min(found.values(), key=lambda p: p.ratio)
    assert len(best.techniques) == 5
    # Neither predicts cached combinations nor any twice.
    assert not set(requested) & set(predictions)
    assert len(requested) == len(set(requested))


def test_predicts_each_remaining_combination_once() -> None:
    requested: list[Combination] = []

    def ask(combinations: Sequence[Combination]) -> list[Predicted]:
        requested.extend(combinations)
        return [product(combination) for combination in combinations]

    predictions = {combination: product(combination) for combination in PARTS[:3]}
    began = time.process_time()
    found, size = search_combinations(
        PARTS[:3], predictions, set(predictions), ask, lambda line: None
    )
    assert size == 2 * 2 * 2 - 1
    assert set(found) == set(requested)
    assert len(requested) == size - len(predictions)
    # Does not propose the same combinations until the time limit.
    assert time.process_time() - began < 5


def test_few_combinations_are_not_searched() -> None:
    predictions = {
        combination: product(combination)
        for combination in (*PARTS[:2], joined(PARTS[0], PARTS[1]))
    }
    found, size = search_combinations(
        PARTS[:2], predictions, set(predictions), lambda _: [], lambda _: None
    )
    assert (found, size) == ({}, 3)
