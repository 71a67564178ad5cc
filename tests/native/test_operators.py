"""No operator of the package crashes or gives wrong numbers on any arguments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sanitized import environment, library

# Take raw pointers, which their callers check.
UNCHECKED = {"scan_backward", "scan_diagonal", "scan_diagonal_backward", "scan_forward"}
PROGRAM = Path(__file__).parent / "operator_attacks.py"


def attacked(*arguments: str, **environment: str) -> dict[str, Any]:
    """Return the outcomes of the calls, in a process that may crash on them."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), *arguments],
        capture_output=True, text=True, env=os.environ | environment,
    )  # fmt: skip
    assert run.returncode == 0, "died in\n" + "\n".join(run.stderr.splitlines()[-40:])
    report: dict[str, Any] = json.loads(run.stdout)
    return report


def test_operators_refuse_or_are_correct() -> None:
    report = attacked()
    assert report["wrong"] == []
    assert set(report["without sample"]) <= UNCHECKED, (
        "give the operator a sample in operator_attacks.py"
    )
    # Enough of them completed for equality to be meaningful.
    assert report["calls"] >= 2000
    assert report["equal"] >= 500


@pytest.fixture(scope="module")
def sanitized(request: pytest.FixtureRequest) -> Path:
    """Return the folder of the library with sanitizers, which takes minutes the first time."""
    if not all(shutil.which(tool) for tool in ("g++", "cmake")):
        pytest.skip("no g++ or no cmake")
    cache = request.config.cache
    assert cache is not None
    return library(cache.mkdir("sanitized"))


@pytest.mark.full
def test_sanitizers_find_nothing_in_operators(sanitized: Path) -> None:
    report = attacked(str(sanitized), **environment())
    assert Path(report["library"]).parent == sanitized
    assert report["wrong"] == []
    assert report["calls"] >= 2000
    assert report["equal"] >= 500


# The count is one more than the number of ids.
_TOO_FAR = """
import ctypes, sys, torch
library = ctypes.CDLL(sys.argv[1])
hot, hits, ids = (torch.full((size,), -1, dtype=torch.int64) for size in (16, 4, 1000))
pointer, number = ctypes.c_void_p, ctypes.c_int64
count = library.slipstream_tt_count
count.argtypes = (pointer, number, number, pointer, number, pointer, pointer)
count(hot.data_ptr(), 8, 4, ids.data_ptr(), len(ids) + int(sys.argv[2]), hits.data_ptr(),
      ids.data_ptr())
"""


@pytest.mark.full
def test_sanitizers_detect_a_read_beyond_the_end(sanitized: Path) -> None:
    for beyond in (0, 1):
        run = subprocess.run(
            [sys.executable, "-c", _TOO_FAR, str(sanitized / "libslipstream_native.so"),
             str(beyond)],
            capture_output=True, text=True, env=os.environ | environment(),
        )  # fmt: skip
        assert ("heap-buffer-overflow" in run.stderr) is bool(beyond), run.stderr[-2000:]
