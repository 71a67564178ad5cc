"""A scene: columns of one simulated step, recorded or edited, that the page draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.graph import Call, Graph, StringTable, TensorSpec, Timeline, find_critical_path
from slipstream.report._arrays import Arrays
from slipstream.report._families import families
from slipstream.report._holdings import holdings
from slipstream.report._paths import Paths

_SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64",
    "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8",
}  # fmt: skip
# Lists of tensors, as in a fused optimizer, can have hundreds.
_SHOWN = 4


class Scenes:
    """Factory of scenes that share strings, calls, nesting and the block of arrays."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.strings = StringTable()
        self._calls = StringTable()
        self._paths = Paths()

    def shared(self) -> dict[str, Any]:
        """Return the tables to which the columns of all scenes refer."""
        return {
            "strings": list(self.strings.freeze()),
            "calls": list(self._calls.freeze()),
            "paths": self._paths.to_json(),
        }

    def scene(self, timeline: Timeline, *, detail: bool) -> dict[str, Any]:
        """Return the first step of `timeline` with its critical path and memory.

        Args:
            detail: whether to include a finer memory curve and more tensors.
        """
        graph, tasks = timeline.graph, timeline.graph.tasks
        path = find_critical_path(timeline)
        busy, waited = np.zeros(len(graph)), np.zeros(len(graph))
        np.add.at(busy, path.task, path.busy_ns)
        np.add.at(waited, path.task, path.waited_ns)
        on_path = np.zeros(len(graph), np.uint8)
        on_path[path.task] = 1
        arrays = self.arrays
        return {
            "step_ns": timeline.step_ns,
            "end_ns": float(timeline.end_ns.max(initial=0.0)),
            "samples": graph.samples,
            "lanes": list(graph.lanes),
            "columns": {
                "start": arrays.times(timeline.start_ns),
                "duration": arrays.real(timeline.end_ns - timeline.start_ns),
                "gap": arrays.real(tasks.gap_ns),
                "name": arrays.integers(self._texts(graph, tasks.name)),
                "module": arrays.integers(self._texts(graph, tasks.module)),
                "source": arrays.integers(self._texts(graph, tasks.source)),
                "call": arrays.integers(self._call_texts(graph)),
                "path": arrays.integers(self._paths.of(graph)),
                "family": arrays.integers(families(graph)),
                "kind": arrays.integers(tasks.kind),
                "phase": arrays.integers(tasks.phase),
                "lane": arrays.integers(tasks.lane),
                "rank": arrays.integers(tasks.rank),
                "provenance": arrays.integers(tasks.provenance),
                "critical": arrays.integers(on_path),
                "busy": arrays.real(busy),
                "waited": arrays.real(waited),
                "slack": arrays.real(path.slack_ns),
                "spread": arrays.real(tasks.spread),
            },
            "memory": holdings(timeline, arrays, detail=detail),
        }

    def _texts(self, graph: Graph, column: Any) -> Any:
        """Convert indices into the graph's strings to indices into the shared ones."""
        return self._shared_index(column, lambda text: self.strings.add(graph.strings[text]))

    def _call_texts(self, graph: Graph) -> Any:
        calls = graph.tasks.call
        return self._shared_index(
            calls,
            lambda call: self._calls.add(_described(graph.calls[call]) if call >= 0 else ""),
        )

    @staticmethod
    def _shared_index(column: Any, index: Any) -> Any:
        used, inverse = np.unique(column, return_inverse=True)
        shared = np.array([index(entry) for entry in used.tolist()], np.int64)
        return shared[inverse] if len(used) else np.zeros(0, np.int64)


def _described(call: Call) -> str:
    """``f32[768], f32[2048,256], f32[256,768] → f32[2048,768]``."""
    outputs = _listed(call.outputs)
    return f"{_listed(call.inputs)} → {outputs}" if outputs else _listed(call.inputs)


def _listed(specs: Sequence[TensorSpec]) -> str:
    texts = [_spec(spec) for spec in specs[:_SHOWN]]
    more = len(specs) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")


def _spec(spec: TensorSpec) -> str:
    shape = ",".join(map(str, spec.shape))
    return f"{_SHORT.get(spec.dtype, spec.dtype)}[{shape}]"
