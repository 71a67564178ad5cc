"""The dependency graph of one step: tasks as arrays, edits as copies, and a file format."""

from slipstream.graph.call import ITEM_BYTES, SCALAR_TYPE, Call, TensorSpec, cast
from slipstream.graph.communicate import (
    NETWORK,
    Work,
    insert_exchange,
    replace_exchange,
    with_overlap,
)
from slipstream.graph.edit import Editor
from slipstream.graph.exchange import Exchange
from slipstream.graph.graph import Graph, need_graph, replace_tasks
from slipstream.graph.io.chakra import read_chakra, write_chakra
from slipstream.graph.io.file import load, save
from slipstream.graph.io.kineto import KinetoTrace, MemoryChange, read_kineto, read_trace
from slipstream.graph.price import UNKNOWN_SPREAD, Price, Prices, price, price_columns
from slipstream.graph.replicate import replicate
from slipstream.graph.scheduling import schedule
from slipstream.graph.select import TaskSelection
from slipstream.graph.statistics import (
    MAX_HOT_IDS,
    GradientNoise,
    ModuleZeros,
    Spectrum,
    Statistics,
    TableIds,
)
from slipstream.graph.timeline import Timeline, lower, replay
from slipstream.graph.values import (
    CLOSURE_RANGE,
    MODULE_RANGE,
    PROVENANCES,
    Allocations,
    Dependency,
    Edges,
    Edit,
    Kind,
    Role,
    StepPhase,
    StringTable,
    Tasks,
    unique_in_order,
)
from slipstream.graph.view import TaskView, calls_of
from slipstream.graph.views.causal import Curve, virtual_speedups
from slipstream.graph.views.critical_path import (
    CriticalPath,
    communication,
    find_critical_path,
    lane_utilisation,
)
from slipstream.graph.views.diff import Difference, difference
from slipstream.graph.views.exposed import ExposedStretch, exposed_by_module, exposed_stretches
from slipstream.graph.views.lines import Attribution, Cost, LineCost, attribute
from slipstream.graph.views.peak import Peak, find_peak
from slipstream.graph.views.perfetto import to_perfetto, write_perfetto

__all__ = [
    "CLOSURE_RANGE",
    "ITEM_BYTES",
    "MAX_HOT_IDS",
    "MODULE_RANGE",
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
    "Spectrum",
    "Statistics",
    "StepPhase",
    "StringTable",
    "TableIds",
    "TaskSelection",
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
    "exposed_by_module",
    "exposed_stretches",
    "find_critical_path",
    "find_peak",
    "insert_exchange",
    "lane_utilisation",
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
    "unique_in_order",
    "virtual_speedups",
    "with_overlap",
    "write_chakra",
    "write_perfetto",
]
