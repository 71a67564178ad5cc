"""Compilation, caching and loading of C++ and Triton sources generated at run time."""

from slipstream.codegen.compiler import (
    CompileError,
    Compiler,
    compiler,
    load,
    why_no_compiler,
)
from slipstream.codegen.prelude import PRELUDE
from slipstream.codegen.triton import import_file, load_triton, why_no_triton

__all__ = [
    "PRELUDE",
    "CompileError",
    "Compiler",
    "compiler",
    "import_file",
    "load",
    "load_triton",
    "why_no_compiler",
    "why_no_triton",
]
