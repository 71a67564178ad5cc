"""C++ and Triton that are generated while a program runs: kept, and loaded."""

from slipstream.codegen.compiler import (
    CompileError,
    Compiler,
    compiler,
    load,
    why_no_compiler,
)
from slipstream.codegen.prelude import PRELUDE
from slipstream.codegen.triton import imported, load_triton, why_no_triton

__all__ = [
    "PRELUDE",
    "CompileError",
    "Compiler",
    "compiler",
    "imported",
    "load",
    "load_triton",
    "why_no_compiler",
    "why_no_triton",
]
