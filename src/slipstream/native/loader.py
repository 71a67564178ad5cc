"""Find and load the compiled library; warn once if it is missing."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamWarning

ENGINE_ABI = 3
_FILE_NAMES = ("libslipstream_native.so", "libslipstream_native.dylib", "slipstream_native.dll")
_OFF = frozenset({"off", "0", "false", "no"})
SWITCHED_OFF = None, "switched off by SLIPSTREAM_NATIVE"

_lock = threading.Lock()
# The library, and why it is missing, after the first search.
_answer: tuple[ctypes.CDLL | None, str | None] | None = None


def library() -> ctypes.CDLL | None:
    """Return the compiled library, or None to use Python; searched once per process.

    ``SLIPSTREAM_NATIVE=off`` in the environment returns None without a warning. A library that is
    missing, cannot be loaded or has another ABI version returns None with one `SlipstreamWarning`.
    """
    return (_answer or _look())[0]


def _look() -> tuple[ctypes.CDLL | None, str | None]:
    global _answer
    with _lock:
        if _answer is not None:
            return _answer
        if os.environ.get("SLIPSTREAM_NATIVE", "").strip().lower() in _OFF:
            _answer = SWITCHED_OFF
            return _answer
        answer = _answer = _load(_search_folders())
    if answer[0] is None:
        warnings.warn(
            f"the compiled engine is not available ({answer[1]}); "
            "pure Python is used instead: same results, much slower",
            SlipstreamWarning,
            stacklevel=3,
        )
    return answer


@functools.cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def build() -> str:
    """Return a hash of the compiled library, since timings hold only for one build.

    Empty without a library.
    """
    engine = library()
    return "" if engine is None else _digest(engine._name)


def why_no_library() -> str | None:
    """Return why `library` returns None; None if it returns a library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlipstreamWarning)
        return (_answer or _look())[1]


@functools.cache
def triton_module(name: str) -> Any:
    """Import a module of CUDA kernels; return None if Triton is not installed.

    Args:
        name: name with the package.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return None


def _search_folders() -> list[Path]:
    # An editable install keeps sources and compiled files in two folders of one package path.
    return [Path(folder) for folder in sys.modules[__package__].__path__]


def _load(folders: list[Path]) -> tuple[ctypes.CDLL | None, str | None]:
    """Return the first library found in `folders`, or why there is none."""
    for folder in folders:
        for name in _FILE_NAMES:
            path = folder / name
            if not path.is_file():
                continue
            try:
                engine = ctypes.CDLL(str(path))
                abi = int(engine.slipstream_engine_abi())
            except (OSError, AttributeError) as error:
                return None, f"{path.name} cannot be loaded: {error}"
            if abi != ENGINE_ABI:
                return None, (
                    f"{path.name} has ABI version {abi}, this package needs {ENGINE_ABI}; "
                    "reinstall slipstream"
                )
            return engine, None
    return None, "it was not built; a C++17 compiler at install time is needed"
