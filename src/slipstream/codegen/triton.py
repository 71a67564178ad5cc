"""Triton kernels generated at run time, written to files and imported.

Triton compiles a kernel for the current device at its first launch, and has its own cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from types import ModuleType

from slipstream.codegen.compiler import CompileError, cache_folder, is_ours
from slipstream.files import replacing


def why_no_triton() -> str | None:
    """Return the reason that no Triton kernel can be generated; None if Triton is installed."""
    if importlib.util.find_spec("triton") is not None:
        return None
    return "Triton is not installed (pip install 'slipstream[triton]')"


def load_triton(source: str) -> ModuleType:
    """Import a module of generated `source`, which is written to the cache folder if needed.

    Raises:
        CompileError: Triton is not installed, the module cannot be imported, or the cache cannot be
            trusted.
    """
    if (reason := why_no_triton()) is not None:
        raise CompileError(f"Triton kernels cannot be generated: {reason}")
    name = f"t{hashlib.sha256(source.encode()).hexdigest()[:31]}"
    path = cache_folder() / f"{name}.py"
    # Other content means a damaged file, for example by a full disk.
    if not is_ours(path) or path.read_bytes() != source.encode():
        try:
            with replacing(path) as temporary:
                temporary.write_text(source, encoding="utf-8")
        except OSError as error:
            raise CompileError(
                f"generated code cannot be stored: {error}", where=str(path)
            ) from error
    try:
        return import_file(path)
    except Exception as error:
        raise CompileError(
            f"generated Triton cannot be imported: {error}", where=str(path)
        ) from error


def import_file(path: Path) -> ModuleType:
    """Import a file as a module, without adding it to ``sys.modules``."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "the file is Python"
    assert spec.loader is not None, "the file is Python"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
