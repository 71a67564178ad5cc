"""Nesting of tasks: a tree of phases, modules and enclosing operators.

The levels above operators repeat: 200,000 tasks of a transformer share a few hundred. A container
(``Sequential``, ``ModuleList``) is not a separate level: ``model.blocks.0.mlp.2`` has the levels
``model``, ``blocks.0`` and ``mlp.2``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import Graph, StepPhase

_HOLDERS = ("Sequential", "ModuleList", "ModuleDict")
_ENGINE = "autograd::engine::evaluate_function: "
_Level = tuple[str, str]


class Paths:
    """A tree of levels, each with a kind (phase, module or operator) and a label."""

    def __init__(self) -> None:
        self._index: dict[tuple[int, str, str], int] = {}
        self._nodes: list[tuple[int, str, str]] = []

    def of(self, graph: Graph) -> NDArray[np.int64]:
        """Return one plus the index of each task's innermost level, int64 [n]; 0 for none."""
        tasks = graph.tasks
        triples = np.stack([tasks.phase.astype(np.int64), tasks.module, tasks.scope], axis=1)
        unique, inverse = np.unique(triples, axis=0, return_inverse=True)
        modules = graph.meta.get("modules")
        classes = modules if isinstance(modules, Mapping) else {}
        levels = [
            self._add(
                (
                    *([("phase", StepPhase(phase).name.lower())] if phase else []),
                    *_modules(graph.strings[module], classes),
                    *_operators(graph.strings[scope]),
                )
            )
            for phase, module, scope in unique.tolist()
        ]
        chosen: NDArray[np.int64] = np.array(levels, np.int64)[inverse.reshape(-1)]
        return chosen

    def to_json(self) -> list[list[Any]]:
        """Return [parent, kind, label] of each level; parents are one plus an index, 0 for none."""
        return [list(node) for node in self._nodes]

    def _add(self, levels: Iterable[_Level]) -> int:
        parent = 0
        for kind, label in levels:
            key = (parent, kind, label)
            if key not in self._index:
                self._nodes.append(key)
                self._index[key] = len(self._nodes)
            parent = self._index[key]
        return parent


def _modules(name: str, classes: Mapping[str, Any]) -> list[_Level]:
    if not name:
        return []
    levels: list[_Level] = []
    parts = name.split(".")
    since = 0
    for end in range(1, len(parts) + 1):
        kind = str(classes.get(".".join(parts[:end]), ""))
        if kind in _HOLDERS and 1 < end < len(parts):
            continue
        label = ".".join(parts[since:end])
        levels.append(("module", f"{label} {kind}".strip()))
        since = end
    return levels


def _operators(scope: str) -> list[_Level]:
    levels: list[str] = []
    for part in filter(None, scope.split("/")):
        plain = part.removeprefix(_ENGINE).removeprefix("Optimizer.step#").rpartition("::")[2]
        # The engine's frame and the function that it evaluates have the same name.
        if not levels or levels[-1] != plain:
            levels.append(plain)
    return [("operator", level) for level in levels]
