"""The dependency graph of one step: tasks as arrays, edits as copies, a file that keeps it."""

from slipstream.graph.call import ITEM_BYTES, Call, TensorSpec, cast
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
from slipstream.graph.timeline import Timeline, lower, replay

__all__ = [
    "ITEM_BYTES",
    "PROVENANCES",
    "Call",
    "Dependency",
    "Edges",
    "Edit",
    "Editor",
    "Graph",
    "Kind",
    "StepPhase",
    "StringTable",
    "Tasks",
    "TensorSpec",
    "Timeline",
    "cast",
    "load",
    "lower",
    "replace_tasks",
    "replay",
    "save",
]
