"""Combinations of techniques as a study: where they are too many to be predicted one and all.

The space has a parameter a technique: left out, or one of its settings that helps alone. The
simulator of graphs is the estimator; the search begins with the combinations grown from pairs.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from slipstream import technique
from slipstream.errors import UsageError
from slipstream.search import Budget, Categorical, Space, study
from slipstream.technique import Technique
from slipstream.verbs.results import Predicted, Prediction

Combination = tuple[Technique, ...]

# What the search may cost on top of the combinations that were grown.
_MOST, _SECONDS = 48, 10.0
_OUT = "-"


def joined(one: Combination, part: Combination) -> Combination | None:
    """The combination of both; None where they cannot stand together."""
    try:
        return technique.combination((*one, *part))
    except UsageError:
        return None


def search_combinations(
    parts: Sequence[Combination],
    known: Mapping[Combination, Predicted],
    tried: Collection[Combination],
    ask: Callable[[Sequence[Combination]], list[Prediction]],
    say: Callable[[str], None],
    longest_s: float = math.inf,
) -> tuple[dict[Combination, Prediction], int]:
    """Predict more combinations of `parts`, those of many techniques among them.

    Args:
        parts: techniques that help alone.
        known: predictions so far, by combination; the search begins with the best of them.
        tried: combinations that were predicted, whatever came of it.
        longest_s: how long it may take, in seconds; there is a limit of its own besides.

    Returns:
        what was predicted in addition; how many combinations there are, those that cannot stand
        together and the empty one left out where they are few enough to be told.
    """
    settings: dict[str, dict[str, Combination]] = {}
    for one in parts:
        settings.setdefault(one[0].name, {})[technique.combination_name(one)] = one
    if len(settings) < 2:
        return {}, len(parts)
    space = Space({name: Categorical((_OUT, *added)) for name, added in settings.items()})

    def combination(config: Mapping[str, Any]) -> Combination | None:
        combined: Combination | None = ()
        for name, setting in config.items():
            if setting != _OUT and combined is not None:
                combined = joined(combined, settings[name][setting])
        return combined or None

    added: dict[Combination, Prediction] = {}
    predicted: dict[Combination, Prediction] = dict(known)

    def estimate(config: Mapping[str, Any]) -> dict[str, float]:
        combined = combination(config)
        if combined is None:
            raise ValueError("they cannot stand together")
        if combined not in predicted and combined in tried:
            raise ValueError("it does not apply")
        if combined not in predicted:
            for prediction in ask([combined]):
                added[combined] = predicted[combined] = prediction
        if combined not in predicted:
            raise ValueError("there is no time left")
        one = predicted[combined]
        if not isinstance(one, Predicted):
            raise ValueError("it does not apply")
        return {"ratio": one.ratio, "memory": float(one.memory[1])}

    size = (space.size or 1) - 1
    seconds = min(_SECONDS, longest_s)
    if size <= len(tried) or seconds <= 0:
        return {}, size
    if size - len(tried) <= _MOST:
        # A search would propose the same ones over and over, for as long as it may.
        began = time.monotonic()
        for values in itertools.product(*((_OUT, *one) for one in settings.values())):
            combined = combination(dict(zip(settings, values, strict=True)))
            if combined is None or combined in predicted or combined in tried:
                continue
            if time.monotonic() - began > seconds:
                break
            for prediction in ask([combined]):
                added[combined] = prediction
        return added, size
    best = sorted(known.values(), key=lambda p: p.ratio)
    as_values = (_values(p.techniques, settings) for p in best)
    start = [one for one in as_values if one is not None][: _MOST // 2]
    say(f"searching {size:,} combinations")
    study(
        "combinations", space, {"ratio": "min", "memory": "min"}, estimator=estimate,
        strategy="evolution", start=start, budget=Budget(trials=_MOST, seconds=seconds),
    ).run()  # fmt: skip
    return added, size


def _values(
    combination: Combination, settings: Mapping[str, Mapping[str, Combination]]
) -> dict[str, str] | None:
    values = dict.fromkeys(settings, _OUT)
    for one in combination:
        name = technique.combination_name((one,))
        if one.name not in settings or name not in settings[one.name]:
            return None
        values[one.name] = name
    return values
