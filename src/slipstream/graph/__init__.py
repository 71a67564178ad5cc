"""The dependency graph of one step: tasks as arrays, edits as copies, a file that keeps it."""

from slipstream.graph.call import ITEM_BYTES, SCALAR_TYPE, Call, TensorSpec, cast
from slipstream.graph.causal import Curve, virtual_speedups
from slipstream.graph.chakra import read_chakra, write_chakra
from slipstream.graph.critical_path import CriticalPath, communication, find_critical_path, lanes
from slipstream.graph.diff import Difference, difference
from slipstream.graph.edit import Editor
from slipstream.graph.file import load, save
from slipstream.graph.graph import (
    PROVENANCES,
    Dependency,
    Edges,
    Edit,
    Graph,
    Kind,
    StepPhase,
    StringTable,
    Tasks,
    replace_tasks,
)
from slipstream.graph.kineto import KinetoTrace, read_kineto, read_trace
from slipstream.graph.memory import Allocations, Role
from slipstream.graph.peak import Peak, find_peak
from slipstream.graph.perfetto import to_perfetto, write_perfetto
from slipstream.graph.statistics import (
    MOST_IDS,
    GradientNoise,
    ModuleZeros,
    Spectrum,
    Statistics,
    TableIds,
)
from slipstream.graph.timeline import Timeline, lower, replay

__all__ = [
    "ITEM_BYTES",
    "MOST_IDS",
    "PROVENANCES",
    "SCALAR_TYPE",
    "Allocations",
    "Call",
    "CriticalPath",
    "Curve",
    "Dependency",
    "Difference",
    "Edges",
    "Edit",
    "Editor",
    "GradientNoise",
    "Graph",
    "Kind",
    "KinetoTrace",
    "ModuleZeros",
    "Peak",
    "Role",
    "Spectrum",
    "Statistics",
    "StepPhase",
    "StringTable",
    "TableIds",
    "Tasks",
    "TensorSpec",
    "Timeline",
    "cast",
    "communication",
    "difference",
    "find_critical_path",
    "find_peak",
    "lanes",
    "load",
    "lower",
    "read_chakra",
    "read_kineto",
    "read_trace",
    "replace_tasks",
    "replay",
    "save",
    "to_perfetto",
    "virtual_speedups",
    "write_chakra",
    "write_perfetto",
]
