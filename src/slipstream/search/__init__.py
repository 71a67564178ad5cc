"""Search: spaces, studies, estimators, strategies, rung policies and executors.

    from slipstream.search import Budget, Float, Space, study

    space = Space({"lr": Float(1e-4, 1e-1, log=True)})
    found = study("lr", space, {"loss": "min"}, estimator=train, store="runs.db")
    found.run(budget=Budget(trials=50)).best()

Every search in the package runs through this loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.search.cascade import Cascade
    from slipstream.search.estimators import Cost, Estimator, TrialPruned, TrialRun, estimator
    from slipstream.search.executors import Executor, Inline, Outcome, Processes, Task
    from slipstream.search.metrics import Limit, Objective, State, Trial, Value
    from slipstream.search.parameters import (
        Bool,
        Categorical,
        Float,
        Int,
        Parameter,
        Permutation,
        Sequence,
        Subset,
    )
    from slipstream.search.rungs import Asha, Halving, Hyperband, RungPolicy, Slot
    from slipstream.search.space import Candidate, Choice, Space
    from slipstream.search.store import StoredStudy
    from slipstream.search.strategies import Strategy
    from slipstream.search.studies import Budget, Study, study

_HOMES = {
    "Asha": "rungs",
    "Bool": "parameters",
    "Budget": "studies",
    "Candidate": "space",
    "Cascade": "cascade",
    "Categorical": "parameters",
    "Choice": "space",
    "Cost": "estimators",
    "Estimator": "estimators",
    "Executor": "executors",
    "Float": "parameters",
    "Halving": "rungs",
    "Hyperband": "rungs",
    "Inline": "executors",
    "Int": "parameters",
    "Limit": "metrics",
    "Objective": "metrics",
    "Outcome": "executors",
    "Parameter": "parameters",
    "Permutation": "parameters",
    "Processes": "executors",
    "TrialPruned": "estimators",
    "StoredStudy": "store",
    "TrialRun": "estimators",
    "RungPolicy": "rungs",
    "Sequence": "parameters",
    "Slot": "rungs",
    "Space": "space",
    "State": "metrics",
    "Strategy": "strategies",
    "Study": "studies",
    "Subset": "parameters",
    "Task": "executors",
    "Trial": "metrics",
    "Value": "metrics",
    "estimator": "estimators",
    "study": "studies",
}

__all__ = [
    "Asha",
    "Bool",
    "Budget",
    "Candidate",
    "Cascade",
    "Categorical",
    "Choice",
    "Cost",
    "Estimator",
    "Executor",
    "Float",
    "Halving",
    "Hyperband",
    "Inline",
    "Int",
    "Limit",
    "Objective",
    "Outcome",
    "Parameter",
    "Permutation",
    "Processes",
    "RungPolicy",
    "Sequence",
    "Slot",
    "Space",
    "State",
    "StoredStudy",
    "Strategy",
    "Study",
    "Subset",
    "Task",
    "Trial",
    "TrialPruned",
    "TrialRun",
    "Value",
    "estimator",
    "study",
]

__getattr__, __dir__ = late(__name__, _HOMES, __all__)
