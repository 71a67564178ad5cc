"""Traced graphs (torch.fx): reading them as operations, and replacing parts of them by modules."""

from slipstream.surgery.fx.rewrite import (
    CyclicReplacementError,
    Replacement,
    replace_regions,
    stack_parts,
)
from slipstream.surgery.fx.simplification import simplify
from slipstream.surgery.fx.trace import (
    Source,
    TracedGraph,
    arguments_of,
    call_of,
    spec_of,
    trace_of,
)

__all__ = [
    "CyclicReplacementError",
    "Replacement",
    "Source",
    "TracedGraph",
    "arguments_of",
    "call_of",
    "replace_regions",
    "simplify",
    "spec_of",
    "stack_parts",
    "trace_of",
]
