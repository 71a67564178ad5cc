"""The compiler that is there, one that is broken, and a cache that others wrote to."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import psutil
import pytest

from slipstream.codegen import CompileError, compiler, load, why_no_compiler
from slipstream.codegen import compiler as room

needed = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))
SOURCE = 'extern "C" int answer() { return 42; }\n'
folder_of = __import__("slipstream.codegen.compiler", fromlist=["cache_folder"])


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(folder_of, "_loaded", {})


@needed
def test_a_source_is_compiled_once() -> None:
    assert load(SOURCE).answer() == 42
    (made,) = folder_of.cache_folder().glob("*.so")
    before = made.stat().st_mtime_ns
    folder_of._loaded.clear()
    assert load(SOURCE).answer() == 42
    assert made.stat().st_mtime_ns == before


@needed
def test_a_damaged_library_is_made_anew() -> None:
    path = folder_of.cache_folder() / f"{compiler().key(SOURCE)}.so"
    path.write_bytes(b"nothing")
    path.chmod(0o600)
    assert load(SOURCE).answer() == 42


@needed
def test_what_others_may_write_to_is_never_loaded() -> None:
    path = folder_of.cache_folder() / f"{compiler().key(SOURCE)}.so"
    path.write_bytes(b"theirs")
    path.chmod(0o666)
    assert load(SOURCE).answer() == 42
    assert not path.stat().st_mode & stat.S_IWOTH
    os.chmod(folder_of.cache_folder(), 0o777)
    folder_of._loaded.clear()
    with pytest.raises(CompileError, match="writable by others"):
        load(SOURCE)


def _ends(pid: int) -> bool:
    """Wait for a process to end; it may stay a zombie until its new parent waits for it."""
    for _ in range(300):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def test_a_time_out_also_ends_the_compilers_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid}; wait"
    with pytest.raises(CompileError, match="did not finish"):
        folder_of._run(["sh", "-c", script], "sh", 2.0)
    assert _ends(int(pid.read_text()))


@needed
def test_what_does_not_compile_shows_what_the_compiler_said() -> None:
    with pytest.raises(CompileError, match="error"):
        load("this is no C++")


@needed
def test_another_source_flag_or_version_has_another_key() -> None:
    found = compiler()
    keys = {found.key(SOURCE), found.key(SOURCE + " "), found.key(SOURCE, ["-DX"])}
    assert len(keys) == 3


@pytest.mark.parametrize("command", ["no-such-compiler", "false"])
def test_a_compiler_that_is_missing_or_broken_is_named(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", command)
    assert command in str(why_no_compiler())
    with pytest.raises(CompileError, match="no C\\+\\+ compiler works"):
        room()
