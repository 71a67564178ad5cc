"""The C++ compiler that is there, and a cache of what it made, by content and processor.

    library = load(source)
    library.add_rows(...)

A library is kept under a hash of its source, the flags, the compiler's version and the processor's
features: what another machine or another compiler made is never loaded. The folder belongs to the
user alone; one that others may write to is not used, since what lies in it would be run.
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

from slipstream.errors import SlipstreamError
from slipstream.files import replacing
from slipstream.native import cpu_features

_TIMEOUT_S = 120.0
_CHECK_TIMEOUT_S = 60.0
_NAMES = ("c++", "g++", "clang++")
_SAID = 600
# What is generated needs nothing newer.
_FLAGS = (
    "-std=c++14", "-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno",
    "-fno-trapping-math", "-ffp-contract=fast", "-fno-plt",
)  # fmt: skip
_TRIAL = '#include <cmath>\nextern "C" int slipstream_trial(int x) { return x + 1; }\n'


class CompileError(SlipstreamError):
    """No compiler, one that failed or took too long, or a cache that cannot be trusted."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that was tried and works.

    Attributes:
        command: how it is called, perhaps with a wrapper and flags before the source.
        version: its first line about itself.
        flags: what it is given: optimised for this processor, with vectors as wide as it has.
        threads: whether ``#pragma omp parallel`` runs on several threads.
    """

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    threads: bool

    def key(self, source: str, extra: Sequence[str] = ()) -> str:
        """What a compiled library is kept under."""
        facts = (source, *self.command, self.version, *self.flags, *extra, *sorted(_features()))
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]

    def build(self, source: str, path: Path, extra: Sequence[str] = ()) -> None:
        """Compile `source` into a library at `path`, whole or not at all.

        Raises:
            CompileError: it does not compile, or not in time.
        """
        with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
            file = Path(folder) / "generated.cpp"
            file.write_text(source, encoding="utf-8")
            with replacing(path) as beside:
                arguments = [*self.command, *self.flags, *extra, str(file), "-o", str(beside)]
                _run(arguments, self.command[0], _TIMEOUT_S)


def _features() -> frozenset[str]:
    """What tells processors apart for which ``-march=native`` gives different code."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset(str(one) for one in cpu_features().features)


def _run(arguments: Sequence[str], name: str, timeout_s: float) -> str:
    """What a compiler says of itself, on its standard output."""
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, errors="replace", timeout=timeout_s,
            env={**os.environ, "LC_ALL": "C"}, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise CompileError(
            f"{name} did not finish within {timeout_s:.0f} s",
            remedy="on a machine less busy; nothing was kept",
        ) from None
    except OSError as error:
        raise CompileError(f"{name} cannot be run: {error.strerror or error}") from error
    if done.returncode:
        message = (done.stderr or done.stdout).strip()[:_SAID]
        raise CompileError(f"{name} failed with exit code {done.returncode}:\n{message}")
    return done.stdout


@functools.cache
def _find(asked: str) -> Compiler | str:
    """A compiler that works, or why there is none."""
    candidates = [tuple(shlex.split(asked))] if asked else [(name,) for name in _NAMES]
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
                        candidate.build(_TRIAL, Path(folder) / "trial.so")
                    except CompileError:
                        if flags is _FLAGS:
                            raise
                        continue
                return candidate
        except CompileError as error:
            reasons.append(error.what.partition("\n")[0])
    if reasons:
        return "; ".join(reasons)
    return f"'{asked}' (of CXX) is not there" if asked else "no c++, g++ or clang++ is installed"


def compiler() -> Compiler:
    """The one that ``CXX`` names, else the first that works; tried once per process.

    Raises:
        CompileError: there is none.
    """
    answer = _find(os.environ.get("CXX", "").strip())
    if isinstance(answer, str):
        raise CompileError(
            f"no C++ compiler that works: {answer}",
            remedy="install g++ or clang, or name one: CXX=/path/to/c++",
        )
    return answer


def why_no_compiler() -> str | None:
    """Why nothing can be generated here; None where a compiler works."""
    answer = _find(os.environ.get("CXX", "").strip())
    return answer if isinstance(answer, str) else None


def cache_folder() -> Path:
    """Where libraries are kept: the user's cache, in a folder of the user's alone.

    Raises:
        CompileError: others own it or may write to it, or it cannot be made.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "slipstream" / "generated"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError) as error:
        raise CompileError(
            f"the folder for generated code cannot be used: {error}", where=str(folder),
            remedy="XDG_CACHE_HOME names another",
        ) from error  # fmt: skip
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CompileError(
            "others may write to the folder of generated code, which would be run",
            where=str(folder), remedy=f"chmod go-w {folder}, or XDG_CACHE_HOME=another",
        )  # fmt: skip
    return folder


_loaded: dict[str, ctypes.CDLL] = {}


def load(source: str, extra: Sequence[str] = ()) -> ctypes.CDLL:
    """The library made of C++ `source`, compiled unless it was before.

    Args:
        extra: more flags.

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
                f"generated code cannot be kept: {error}", where=str(path)
            ) from error
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        # Damaged, as by a full disk: made anew, once.
        path.unlink(missing_ok=True)
        toolchain.build(source, path, extra)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise CompileError(f"generated code cannot be loaded: {error}") from error
    _loaded[key] = library
    return library


def is_ours(path: Path) -> bool:
    """Whether a library is there that this user wrote and nobody else can change."""
    try:
        status = path.lstat()
    except OSError:
        return False
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not others:
        return True
    path.unlink(missing_ok=True)
    return False
