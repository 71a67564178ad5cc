"""Graphs and parsed reports for tests of the report."""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.durations import Durations
from slipstream.durations.durations import Timing
from slipstream.graph import Allocations, Edges, Graph, Tasks
from slipstream.provenance import Provenance

_TYPES = {"u8": "<u1", "u16": "<u2", "i32": "<i4", "f32": "<f4", "f64": "<f8"}


class AlikeDurations(Durations):
    """Every call takes ten microseconds; nothing is measured."""

    def __init__(self) -> None:
        super().__init__(threads=1, path=Path(os.devnull, "durations.db"))

    def lookup(self, call: Any) -> Timing:
        return Timing(1e4, 0.02, Provenance.MICROBENCHMARK)

    def measure(
        self, calls: Any, report: Any = lambda line: None, until: Any = None, **how: Any
    ) -> None:
        for _ in calls:
            pass


def empty_graph() -> Graph:
    """Return a step without tasks."""
    return Graph(
        Tasks(**{name: np.zeros(0, dtype) for name, dtype in Tasks.dtypes.items()}),
        Edges.none(), ("",), (), np.zeros(1, np.int64), np.zeros(0, np.int32),
        np.zeros(0, np.int32), (), 0,
    )  # fmt: skip


def without_memory(graph: Graph) -> Graph:
    """Return a recording like a trace of another tool."""
    return replace(graph, memory=Allocations.none())


class Report:
    """A parsed report."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self.document: dict[str, Any] = json.loads(self._element("document"))
        self._arrays = zlib.decompress(base64.b64decode(self._element("arrays")))

    def column(self, reference: dict[str, Any]) -> np.ndarray:
        """Return the numbers of a reference in the document."""
        return np.frombuffer(
            self._arrays, _TYPES[reference["type"]], reference["length"], reference["at"]
        )

    def _element(self, name: str) -> str:
        found = re.search(rf'<script type="[^"]*" id="{name}">(.*?)</script>', self.text, re.S)
        assert found is not None
        return found[1]
