"""The search over combinations finds what growing from pairs leaves out, and loses nothing."""

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
    """Each part saves a tenth of what is left; threads:2 nothing with others."""
    ratio = 0.9 ** len(parts) * (1.2 if parse("threads:2")[0] in parts else 1.0)
    return Predicted(
        combination_name(parts), 1e6, 1e6 * ratio, ratio, ratio, ratio, memory=(100, 100),
        quality=Quality(QualityKind.EXACT, "made up"), techniques=parts,
    )  # fmt: skip


def test_combinations_of_many_parts_are_found() -> None:
    asked: list[Combination] = []

    def ask(wanted: Sequence[Combination]) -> list[Predicted]:
        asked.extend(wanted)
        return [product(one) for one in wanted]

    pairs = [joined(one, other) for one in PARTS for other in PARTS]
    grown = [one for one in (*PARTS, *pairs) if one is not None]
    known = {one: product(one) for one in dict.fromkeys(grown)}
    found, size = search_combinations(PARTS, known, set(known), ask, lambda line: None)
    # Five techniques, of which one has two settings.
    assert size == 2 * 2 * 2 * 3 * 2 - 1
    best = min(found.values(), key=lambda p: p.ratio)
    assert len(best.techniques) == 5
    # What was known is not predicted again, and nothing twice.
    assert not set(asked) & set(known)
    assert len(asked) == len(set(asked))


def test_what_is_left_of_few_combinations_is_predicted_and_no_more() -> None:
    asked: list[Combination] = []

    def ask(wanted: Sequence[Combination]) -> list[Predicted]:
        asked.extend(wanted)
        return [product(one) for one in wanted]

    known = {one: product(one) for one in PARTS[:3]}
    began = time.process_time()
    found, size = search_combinations(PARTS[:3], known, set(known), ask, lambda line: None)
    assert size == 2 * 2 * 2 - 1
    assert set(found) == set(asked)
    assert len(asked) == size - len(known)
    # Nothing is proposed again and again until the time is over.
    assert time.process_time() - began < 5


def test_few_combinations_are_not_searched() -> None:
    known = {one: product(one) for one in (*PARTS[:2], joined(PARTS[0], PARTS[1]))}
    found, size = search_combinations(PARTS[:2], known, set(known), lambda _: [], lambda _: None)
    assert (found, size) == ({}, 3)
