"""The program native/tests/lowbit_driver.cpp, built with various options, and its output."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Verdict:
    """The driver's result for one kernel."""

    kernel: str
    problems: int
    failures: int


def build(folder: Path, *options: str, flags: str = "", source: Path = ROOT) -> Path:
    """Compile the driver into `folder` with CMake's `options` and the compiler's `flags`."""
    configure = ["cmake", "-S", source, "-B", folder, f"-DCMAKE_CXX_FLAGS=-O1 {flags}", *options]
    for command in (configure, ["cmake", "--build", folder, "-j2", "--target", "lowbit_driver"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder / "native" / "lowbit_driver"


def run(*command: str | Path) -> tuple[list[Verdict], str]:
    """Return its verdicts, and its output if there was an error (empty if not)."""
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.findall(r"^(\w+) (\d+) problems (\d+) failures$", done.stdout, re.MULTILINE)
    verdicts = [Verdict(name, int(count), int(wrong)) for name, count, wrong in found]
    return verdicts, done.stdout + done.stderr if done.returncode else ""
