"""Loader of compiled code, instruction sets, and the event engine.

Without the compiled library everything here returns the same results, only more slowly.
"""

from slipstream.native._heap import changes_in_turn, heap_growth
from slipstream.native._memory import MemoryTimeline, memory_timeline
from slipstream.native.engine import (
    RESOLUTION_NS,
    Compiled,
    Schedule,
    quantize_ns,
    simulate,
)
from slipstream.native.inputs import (
    Edges,
    Flows,
    Names,
    Packets,
    Policy,
    Resources,
    Tensors,
)
from slipstream.native.instruction_set import CpuFeatures, InstructionSet, cpu_features
from slipstream.native.loader import build, library, triton_module, why_no_library
from slipstream.native.program import Program
from slipstream.native.results import CycleError, QueueCounts, RateChanges

__all__ = [
    "RESOLUTION_NS",
    "Compiled",
    "CpuFeatures",
    "CycleError",
    "Edges",
    "Flows",
    "InstructionSet",
    "MemoryTimeline",
    "Names",
    "Packets",
    "Policy",
    "Program",
    "QueueCounts",
    "RateChanges",
    "Resources",
    "Schedule",
    "Tensors",
    "build",
    "changes_in_turn",
    "cpu_features",
    "heap_growth",
    "library",
    "memory_timeline",
    "quantize_ns",
    "simulate",
    "triton_module",
    "why_no_library",
]
