"""The heap, in separate processes, because its settings cannot be undone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slipstream import heap

# Larger than what glibc retains by default after the first free.
_FAULTS = """
import ctypes, sys
from slipstream import heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def touch():
    before = heap.page_faults()
    blocks = [libc.malloc(6 << 20) for _ in range(6)]
    for block in blocks:
        ctypes.memset(block, 1, 6 << 20)
    for block in blocks:
        libc.free(block)
    return heap.page_faults() - before
if sys.argv[1] == "keep":
    assert heap.keep_pages()
touch()
print(sum(touch() for _ in range(3)))
"""

needs_glibc = pytest.mark.skipif(not heap.can_keep_pages(), reason="the C library is not glibc")


def faults(how: str, **environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS, how],
        env={**os.environ, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout)


@needs_glibc
def test_a_process_that_keeps_its_pages_faults_them_in_once() -> None:
    assert faults("as it is") > 3000
    assert faults("keep") < 100


@needs_glibc
def test_environment_variables_have_the_same_effect() -> None:
    assert faults("as it is", **heap.KEEPING) < 100


def test_page_faults_only_increase() -> None:
    before = heap.page_faults()
    bytearray(8 << 20)
    assert heap.page_faults() >= before


def test_without_options_of_the_c_library_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_mallopt", lambda: None)
    assert not heap.can_keep_pages()
    assert not heap.keep_pages()
