"""Traced graphs (torch.fx): reading them as operations, and replacing parts of them by modules."""

from slipstream.surgery.fx.lean import lean
from slipstream.surgery.fx.rewrite import (
    CyclicReplacementError,
    Replacement,
    rewritten,
    stack_parts,
)
from slipstream.surgery.fx.trace import Source, Traced, call_of, spec_of, trace_of

__all__ = [
    "CyclicReplacementError",
    "Replacement",
    "Source",
    "Traced",
    "call_of",
    "lean",
    "rewritten",
    "spec_of",
    "stack_parts",
    "trace_of",
]
