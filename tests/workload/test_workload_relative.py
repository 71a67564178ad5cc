"""A package file with relative imports is refused with the command that would work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MAKES = """
import torch
def make():
    return Net(), torch.ones(2, 3), lambda out, batch: out.sum(), None
"""
NET = "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self): super().__init__(3, 3)\n"


@pytest.mark.parametrize("target", ["train.py:make", "train.py"])
def test_the_remedy_for_a_relative_import_works(tmp_path: Path, target: str) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text(NET)
    train = package / "train.py"
    train.write_text("from .net import Net\n" + MAKES)
    command = [sys.executable, "-m", "slipstream", "profile", str(package / target)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 1
    found = re.search(r"line (\d+): (from \S+ import \w+), and put (PYTHONPATH)=(\S+) ", ran.stderr)
    assert found is not None, ran.stderr
    line, instead, name, value = found.groups()
    lines = train.read_text().splitlines()
    lines[int(line) - 1] = instead
    train.write_text("\n".join(lines))
    again = subprocess.run(
        [sys.executable, "-c", train.read_text() + "\nmake()"],
        env={**os.environ, name: value}, capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
