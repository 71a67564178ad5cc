"""Strategies by name, and the default strategy of a study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from slipstream.errors import UnknownNameError
from slipstream.search.metrics import Objective
from slipstream.search.optuna_samplers import OptunaSampler
from slipstream.search.space import Space
from slipstream.search.strategies import (
    BoostedTrees,
    Evolution,
    Grid,
    QuasiRandom,
    Random,
    Strategy,
)

_OPTUNA = ("tpe", "gp", "nsga2", "nsga3", "cmaes")
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    **{kind.name: kind for kind in (Random, Grid, QuasiRandom, Evolution, BoostedTrees)},
    **{name: partial(OptunaSampler, name) for name in _OPTUNA},
}


def strategy_named(name: str) -> Strategy:
    """Return a new strategy by its name.

    Raises:
        UnknownNameError: no strategy has this name.
    """
    if name not in STRATEGIES:
        raise UnknownNameError("strategy", name, STRATEGIES)
    return STRATEGIES[name]()


def choose(space: Space, objectives: Sequence[Objective], trials: int | None) -> tuple[str, str]:
    """Return the name of the default strategy, and the reason for it.

    Args:
        trials: number of trials in the budget; None if unlimited.
    """
    size = space.size
    if size is not None and trials is not None and size <= trials:
        return "grid", f"the whole space has {size} candidates"
    if any(leaf.parameter.units > 1 for leaf in space.leaves):
        return "evolution", "permutations, subsets and sequences have neighbours but no axes"
    if len(objectives) > 1:
        return "evolution", "several objectives: parents come from the Pareto front"
    if trials is not None and trials <= 20:
        return "quasirandom", f"{trials} trials are too few to learn from"
    try:
        import optuna  # noqa: F401
    except ImportError:
        return "evolution", "Optuna is not installed (pip install 'slipstream[search]' for TPE)"
    return "tpe", "one objective, and only scalar parameters"
