"""C++ that is generated while a program runs: compiled once, kept, and loaded."""

from slipstream.codegen.compiler import (
    CompileError,
    Compiler,
    compiler,
    load,
    why_no_compiler,
)
from slipstream.codegen.prelude import PRELUDE

__all__ = ["PRELUDE", "CompileError", "Compiler", "compiler", "load", "why_no_compiler"]
