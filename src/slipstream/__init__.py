"""What would make this PyTorch model cheaper, by how much, and is that true?

    import slipstream as ss

    graph = ss.profile("train.py:make_workload")     # run the step, record what ran
    ss.predict(graph, ["amp:bf16"])                  # what if?
    ss.apply("train.py:make_workload", "amp:bf16")   # the real transformation

Everything is imported on first use; ``import slipstream`` itself does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream import data, measure
    from slipstream.graph import Graph, load
    from slipstream.report import write_report
    from slipstream.verbs._advise import advise
    from slipstream.verbs._apply import Applied, apply
    from slipstream.verbs._predict import Prediction, predict
    from slipstream.verbs._profile import profile
    from slipstream.verbs._prove import prove
    from slipstream.workload import Built, Workload

_HOMES = {
    "slipstream.graph": ("Graph", "load"),
    "slipstream.report": ("write_report",),
    "slipstream.verbs._advise": ("advise",),
    "slipstream.verbs._apply": ("Applied", "apply"),
    "slipstream.verbs._predict": ("Prediction", "predict"),
    "slipstream.verbs._profile": ("profile",),
    "slipstream.verbs._prove": ("prove",),
    "slipstream.workload": ("Built", "Workload"),
}
_ROOMS = ("data", "measure")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Applied",
    "Built",
    "Graph",
    "Prediction",
    "Workload",
    "advise",
    "apply",
    "data",
    "load",
    "measure",
    "predict",
    "profile",
    "prove",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"slipstream.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'slipstream' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
