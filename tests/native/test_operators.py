"""No operator of ours crashes or gives wrong numbers, whatever it is given."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sanitized import NATIVE

# Take pointers as they come: their callers check. To be given checks and samples.
UNCHECKED = {"scan_backward", "scan_diagonal", "scan_diagonal_backward", "scan_forward"}
PROGRAM = Path(__file__).parent / "operator_attacks.py"


def attacked(*arguments: str, **environment: str) -> dict[str, Any]:
    """What came of the calls, in a process that may die of them."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), *arguments],
        capture_output=True, text=True, env=os.environ | environment,
    )  # fmt: skip
    assert run.returncode == 0, "died in\n" + "\n".join(run.stderr.splitlines()[-40:])
    report: dict[str, Any] = json.loads(run.stdout)
    return report


def test_operators_refuse_or_are_right() -> None:
    report = attacked()
    assert report["wrong"] == []
    assert set(report["without sample"]) <= UNCHECKED, (
        "give the operator a sample in operator_attacks.py"
    )
    # Enough of them ran through for equality to mean something.
    assert report["calls"] >= 2000
    assert report["equal"] >= 500


@pytest.mark.full
def test_the_address_sanitizer_finds_nothing(
    tmp_path: Path, require: Callable[[str, bool, str], None]
) -> None:
    tools = all(shutil.which(one) for one in ("g++", "cmake"))
    require("native", tools, "no g++ or no cmake")
    flags = "-fsanitize=address -fno-omit-frame-pointer"
    subprocess.run(
        ["cmake", "-S", str(NATIVE.parent), "-B", str(tmp_path), f"-DCMAKE_CXX_FLAGS={flags}"],
        check=True,
    )
    subprocess.run(["cmake", "--build", str(tmp_path), "--target", "slipstream_native"], check=True)
    built = next(tmp_path.rglob("libslipstream_native.so"))
    runtime = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    # What Python itself never gives back is no leak of ours.
    report = attacked(
        str(built.parent), LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0", OMP_NUM_THREADS="1"
    )
    assert report["wrong"] == []
