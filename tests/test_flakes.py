"""A test that passes on a retry is reported each time, and fails at the third."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def again(folder: Path, text: str) -> tuple[int, str]:
    (folder / "test_one.py").write_text(text)
    (folder / "conftest.py").write_text("pytest_plugins = ('flakes',)")
    environment = {
        **os.environ, "SLIPSTREAM_FLAKES": str(folder / "seen.json"), "PYTHONPATH": str(TESTS)
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--flakes", "-q", "-p", "no:cacheprovider", str(folder)],
        env=environment, capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    return run.returncode, run.stdout


def test_a_flake_is_named_and_fails_the_third_time(tmp_path: Path) -> None:
    text = "def test_now_and_then():\n    pass\n"
    found = [again(tmp_path, text) for _ in range(3)]
    assert [code for code, _ in found] == [0, 0, 1]
    for count, (_, output) in enumerate(found, 1):
        assert f"FLAKE test_one.py::test_now_and_then (seen {count} of 3 times" in output


def test_a_test_that_fails_twice_is_not_a_flake(tmp_path: Path) -> None:
    code, output = again(tmp_path, "def test_never():\n    raise ValueError\n")
    assert code == 1
    assert "FLAKE" not in output
    assert not (tmp_path / "seen.json").exists()
