"""Triton kernels that are generated while a program runs: kept as files, and imported.

Triton compiles a kernel for the device that is there when it is first launched, and keeps what it
made in a cache of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from types import ModuleType

from slipstream.codegen.compiler import CompileError, cache_folder, is_ours
from slipstream.files import replacing


def why_no_triton() -> str | None:
    """Why no kernel can be generated for a CUDA device; None where Triton is installed."""
    if importlib.util.find_spec("triton") is not None:
        return None
    return "Triton is not installed (pip install 'slipstream[triton]')"


def load_triton(source: str) -> ModuleType:
    """The module of generated `source`, written to the folder of generated code unless it is there.

    Raises:
        CompileError: Triton is not installed, it cannot be imported, or the cache cannot be
            trusted.
    """
    if (reason := why_no_triton()) is not None:
        raise CompileError(f"no kernels for a CUDA device: {reason}")
    name = f"t{hashlib.sha256(source.encode()).hexdigest()[:31]}"
    path = cache_folder() / f"{name}.py"
    # A file of another size or content is damaged, as by a full disk.
    if not is_ours(path) or path.read_bytes() != source.encode():
        try:
            with replacing(path) as beside:
                beside.write_text(source, encoding="utf-8")
        except OSError as error:
            raise CompileError(
                f"generated code cannot be kept: {error}", where=str(path)
            ) from error
    try:
        return imported(path)
    except Exception as error:
        raise CompileError(
            f"generated Triton cannot be imported: {error}", where=str(path)
        ) from error


def imported(path: Path) -> ModuleType:
    """A module of a file, under the file's name; none other can import it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "the file is Python"
    assert spec.loader is not None, "the file is Python"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
