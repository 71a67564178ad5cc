"""Source-to-source fusion of Triton kernels, checked on the CPU and compiled without a GPU."""

from slipstream.techniques.side_by_side.triton.arguments import Argument, arguments_of
from slipstream.techniques.side_by_side.triton.check import ProgramResources, compile_fused, emulate
from slipstream.techniques.side_by_side.triton.fuse import FusedPrograms, ProgramPart, fuse

__all__ = [
    "Argument",
    "FusedPrograms",
    "ProgramPart",
    "ProgramResources",
    "arguments_of",
    "compile_fused",
    "emulate",
    "fuse",
]
