"""The dependency graph of one step: tasks as arrays, edits as copies, a file that keeps it."""

from slipstream.graph._kineto_host import MODULE_RANGE
from slipstream.graph.call import ITEM_BYTES, SCALAR_TYPE, Call, TensorSpec, cast
from slipstream.graph.causal import Curve, virtual_speedups
from slipstream.graph.chakra import read_chakra, write_chakra
from slipstream.graph.communicate import (
    NETWORK,
    Work,
    insert_exchange,
    replace_exchange,
    with_overlap,
)
from slipstream.graph.critical_path import CriticalPath, communication, find_critical_path, lanes
from slipstream.graph.diff import Difference, difference
from slipstream.graph.edit import Editor
from slipstream.graph.exchange import Exchange
from slipstream.graph.exposed import ExposedStretch, exposed_by_module, exposed_stretches
from slipstream.graph.file import load, save
from slipstream.graph.graph import Graph, need_graph, replace_tasks
from slipstream.graph.kineto import KinetoTrace, MemoryChange, read_kineto, read_trace
from slipstream.graph.lines import Attribution, Cost, LineCost, attribute
from slipstream.graph.memory import Allocations, Role
from slipstream.graph.peak import Peak, find_peak
from slipstream.graph.perfetto import to_perfetto, write_perfetto
from slipstream.graph.price import UNKNOWN_SPREAD, Price, Prices, price, price_columns
from slipstream.graph.replicate import replicate
from slipstream.graph.scheduling import schedule
from slipstream.graph.select import Selection
from slipstream.graph.statistics import (
    MOST_IDS,
    GradientNoise,
    ModuleZeros,
    Spectrum,
    Statistics,
    TableIds,
)
from slipstream.graph.timeline import Timeline, lower, replay
from slipstream.graph.values import (
    PROVENANCES,
    Dependency,
    Edges,
    Edit,
    Kind,
    StepPhase,
    StringTable,
    Tasks,
    distinct,
)
from slipstream.graph.view import TaskView, calls_of

__all__ = [
    "ITEM_BYTES",
    "MODULE_RANGE",
    "MOST_IDS",
    "NETWORK",
    "PROVENANCES",
    "SCALAR_TYPE",
    "UNKNOWN_SPREAD",
    "Allocations",
    "Attribution",
    "Call",
    "Cost",
    "CriticalPath",
    "Curve",
    "Dependency",
    "Difference",
    "Edges",
    "Edit",
    "Editor",
    "Exchange",
    "ExposedStretch",
    "GradientNoise",
    "Graph",
    "Kind",
    "KinetoTrace",
    "LineCost",
    "MemoryChange",
    "ModuleZeros",
    "Peak",
    "Price",
    "Prices",
    "Role",
    "Selection",
    "Spectrum",
    "Statistics",
    "StepPhase",
    "StringTable",
    "TableIds",
    "TaskView",
    "Tasks",
    "TensorSpec",
    "Timeline",
    "Work",
    "attribute",
    "calls_of",
    "cast",
    "communication",
    "difference",
    "distinct",
    "exposed_by_module",
    "exposed_stretches",
    "find_critical_path",
    "find_peak",
    "insert_exchange",
    "lanes",
    "load",
    "lower",
    "need_graph",
    "price",
    "price_columns",
    "read_chakra",
    "read_kineto",
    "read_trace",
    "replace_exchange",
    "replace_tasks",
    "replay",
    "replicate",
    "save",
    "schedule",
    "to_perfetto",
    "virtual_speedups",
    "with_overlap",
    "write_chakra",
    "write_perfetto",
]
