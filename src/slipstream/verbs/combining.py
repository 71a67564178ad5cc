"""Search combinations of techniques when there are too many to predict all.

Each technique is a parameter of the space: left out, or one of its settings that helps alone. The
graph simulator is the estimator; the search starts from the combinations grown from pairs.
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

# Budget of the search, in addition to the combinations that were grown.
_MAX_TRIALS, _MAX_S = 48, 10.0
_OUT = "-"


def joined(combination: Combination, part: Combination) -> Combination | None:
    """Return the combination of both, or None if they conflict."""
    try:
        return technique.combination((*combination, *part))
    except UsageError:
        return None


def search_combinations(
    parts: Sequence[Combination],
    predictions: Mapping[Combination, Predicted],
    tried: Collection[Combination],
    ask: Callable[[Sequence[Combination]], list[Prediction]],
    report: Callable[[str], None],
    max_s: float = math.inf,
) -> tuple[dict[Combination, Prediction], int]:
    """Predict further combinations of `parts`, including those of many techniques.

    Args:
        parts: techniques that help alone.
        predictions: by combination; the search starts from the best of them.
        tried: every combination attempted so far.
        max_s: time limit in seconds, in addition to the search's own.

    Returns:
        the new predictions; the number of combinations (of those that do not conflict, if few).
    """
    settings: dict[str, dict[str, Combination]] = {}
    for part in parts:
        settings.setdefault(part[0].name, {})[technique.combination_name(part)] = part
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
    predicted: dict[Combination, Prediction] = dict(predictions)

    def estimate(config: Mapping[str, Any]) -> dict[str, float]:
        combined = combination(config)
        if combined is None:
            raise ValueError("these techniques conflict")
        if combined not in predicted and combined in tried:
            raise ValueError("it does not apply")
        if combined not in predicted:
            for prediction in ask([combined]):
                added[combined] = predicted[combined] = prediction
        if combined not in predicted:
            raise ValueError("the time limit is reached")
        prediction = predicted[combined]
        if not isinstance(prediction, Predicted):
            raise ValueError("it does not apply")
        return {"ratio": prediction.ratio, "memory": float(prediction.memory[1])}

    size = (space.size or 1) - 1
    seconds = min(_MAX_S, max_s)
    if size <= len(tried) or seconds <= 0:
        return {}, size
    if size - len(tried) <= _MAX_TRIALS:
        # A search would propose the same combinations repeatedly until its time limit.
        began = time.monotonic()
        for values in itertools.product(*((_OUT, *added) for added in settings.values())):
            combined = combination(dict(zip(settings, values, strict=True)))
            if combined is None or combined in predicted or combined in tried:
                continue
            if time.monotonic() - began > seconds:
                break
            for prediction in ask([combined]):
                added[combined] = prediction
        return added, size
    best = sorted(predictions.values(), key=lambda p: p.ratio)
    as_values = (_values(p.techniques, settings) for p in best)
    start = [values for values in as_values if values is not None][: _MAX_TRIALS // 2]
    report(f"searching {size:,} combinations")
    study(
        "combinations", space, {"ratio": "min", "memory": "min"}, estimator=estimate,
        strategy="evolution", start=start, budget=Budget(trials=_MAX_TRIALS, seconds=seconds),
    ).run()  # fmt: skip
    return added, size


def _values(
    combination: Combination, settings: Mapping[str, Mapping[str, Combination]]
) -> dict[str, str] | None:
    values = dict.fromkeys(settings, _OUT)
    for part in combination:
        name = technique.combination_name((part,))
        if part.name not in settings or name not in settings[part.name]:
            return None
        values[part.name] = name
    return values
