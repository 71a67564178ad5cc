"""C++ compiler of this machine, and a cache of compiled libraries.

    library = load(source)
    library.add_rows(...)

The cache key is a hash of the source, the flags, the compiler's version and the processor's
features, so that libraries of another machine or compiler are never loaded. Since its contents are
executed, the cache folder must belong to the user and not be writable by others.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.child.descendants import end_group
from slipstream.errors import SlipstreamError
from slipstream.files import replacing
from slipstream.native import cpu_features

_TIMEOUT_S = 600.0
_CHECK_TIMEOUT_S = 60.0
_NAMES = ("c++", "g++", "clang++")
_MAX_MESSAGE_CHARS = 600
_FLAGS = (
    "-std=c++14", "-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno",
    "-fno-trapping-math", "-ffp-contract=fast", "-fno-plt",
)  # fmt: skip
_PROBE_SOURCE = '#include <cmath>\nextern "C" int slipstream_trial(int x) { return x + 1; }\n'


class CompileError(SlipstreamError):
    """There is no compiler, it failed or timed out, or the cache cannot be trusted."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that has been tested.

    Attributes:
        command: command line up to the source, possibly with a wrapper and flags.
        version: first line of ``--version``.
        flags: flags that optimise for this processor and its widest vectors.
        threads: whether OpenMP is enabled, so that ``#pragma omp parallel`` uses several threads.
    """

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    threads: bool

    def key(self, source: str, extra: Sequence[str] = ()) -> str:
        """Return the cache key of a compiled library."""
        facts = (source, *self.command, self.version, *self.flags, *extra, *sorted(_features()))
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]

    def build(self, source: str, path: Path, extra: Sequence[str] = ()) -> None:
        """Compile `source` into a library at `path`, which is written atomically.

        Raises:
            CompileError: the compilation fails or times out.
        """
        with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
            file = Path(folder) / "generated.cpp"
            file.write_text(source, encoding="utf-8")
            with replacing(path) as temporary:
                arguments = [*self.command, *self.flags, *extra, str(file), "-o", str(temporary)]
                _run(arguments, self.command[0], _TIMEOUT_S)


def _features() -> frozenset[str]:
    """Return processor features, which determine the code that ``-march=native`` generates."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset(str(feature) for feature in cpu_features().features)


def _run(arguments: Sequence[str], name: str, timeout_s: float) -> str:
    try:
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            text=True, errors="replace", env={**os.environ, "LC_ALL": "C"}, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise CompileError(f"{name} cannot be run: {error.strerror or error}") from error
    with process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException as error:
            # The driver's children, such as cc1plus, would continue without it.
            end_group(process.pid)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise CompileError(
                f"{name} did not finish within {timeout_s:.0f} s",
                remedy="try again when the machine is less busy",
            ) from None
    if process.returncode:
        message = (errors or output).strip()[:_MAX_MESSAGE_CHARS]
        raise CompileError(f"{name} failed with exit code {process.returncode}:\n{message}")
    return output


@functools.cache
def _find(requested: str) -> Compiler | str:
    """Return a compiler that works, or the reason that there is none."""
    candidates = [tuple(shlex.split(requested))] if requested else [(name,) for name in _NAMES]
    reasons = []
    for command in candidates:
        where = shutil.which(command[0]) if command else None
        if where is None:
            continue
        full = (where, *command[1:])
        try:
            version = _run([*full, "--version"], where, _CHECK_TIMEOUT_S).partition("\n")[0]
            wide = ("-mprefer-vector-width=512",) if "avx512f" in _features() else ()
            plain = (*_FLAGS, *wide)
            for flags, threads in (((*plain, "-fopenmp"), True), (plain, False), (_FLAGS, False)):
                candidate = Compiler(full, version, flags, threads)
                with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
                    try:
                        candidate.build(_PROBE_SOURCE, Path(folder) / "probe.so")
                    except CompileError:
                        if flags is _FLAGS:
                            raise
                        continue
                return candidate
        except CompileError as error:
            reasons.append(error.what.partition("\n")[0])
    if reasons:
        return "; ".join(reasons)
    if requested:
        return f"'{requested}' (from CXX) does not exist"
    return "no c++, g++ or clang++ is installed"


def compiler() -> Compiler:
    """Return the compiler in ``CXX``, or else the first that works; tested once per process.

    Raises:
        CompileError: no compiler works.
    """
    found = _find(os.environ.get("CXX", "").strip())
    if isinstance(found, str):
        raise CompileError(
            f"no C++ compiler works: {found}",
            remedy="install g++ or clang, or set CXX=/path/to/c++",
        )
    return found


def why_no_compiler() -> str | None:
    """Return the reason that no code can be compiled; None if a compiler works."""
    found = _find(os.environ.get("CXX", "").strip())
    return found if isinstance(found, str) else None


def cache_folder() -> Path:
    """Return the folder of compiled libraries in the user's cache, after checking its owner.

    Raises:
        CompileError: the folder cannot be created, has another owner, or is writable by others.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "slipstream" / "generated"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError) as error:
        raise CompileError(
            f"the folder for generated code cannot be used: {error}", where=str(folder),
            remedy="set XDG_CACHE_HOME to a writable folder",
        ) from error  # fmt: skip
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CompileError(
            "the folder for generated code, which is executed, is writable by others",
            where=str(folder), remedy=f"run chmod go-w {folder}, or set XDG_CACHE_HOME",
        )  # fmt: skip
    return folder


_loaded: dict[str, ctypes.CDLL] = {}


def load(source: str, extra: Sequence[str] = ()) -> ctypes.CDLL:
    """Load the library of C++ `source`, and compile it if it is not cached.

    Args:
        extra: additional compiler flags.

    Raises:
        CompileError: there is no compiler, it fails, or the cache cannot be trusted.
    """
    toolchain = compiler()
    key = toolchain.key(source, extra)
    if key in _loaded:
        return _loaded[key]
    path = cache_folder() / f"{key}.so"
    if not is_ours(path):
        try:
            toolchain.build(source, path, extra)
        except OSError as error:
            raise CompileError(
                f"generated code cannot be stored: {error}", where=str(path)
            ) from error
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        # Damaged, for example by a full disk: compile it again, once.
        path.unlink(missing_ok=True)
        toolchain.build(source, path, extra)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise CompileError(f"generated code cannot be loaded: {error}") from error
    _loaded[key] = library
    return library


def is_ours(path: Path) -> bool:
    """Whether a file exists that belongs to this user and is writable by no other.

    A file that fails the check is deleted.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not others:
        return True
    path.unlink(missing_ok=True)
    return False
