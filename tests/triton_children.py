"""Tests of Triton's kernels run in separate processes.

Whether kernels are interpreted is decided when they are first imported, and torch imports Triton
when it compiles.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def run_tests(
    file: Path, tmp_path: Path, require: Callable[[str, bool, str], None], *, interpreted: bool
) -> None:
    """Run the tests of `file`, whose name pytest does not collect by default.

    Args:
        interpreted: by Triton's interpreter, on the CPU; else they are compiled.
    """
    require("triton", importlib.util.find_spec("triton") is not None, "triton is not installed")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    if interpreted:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert "skipped" not in run.stdout
