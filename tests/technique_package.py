"""Techniques of another package, installed like any package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


EXAMPLE = ROOT / "examples" / "technique_package"
SPREADING = ROOT / "tests" / "spreading_package"


def install(folder: Path, package: Path = EXAMPLE) -> Path:
    """Build and install it from a copy in `folder`, without a network; return its location."""
    shutil.copytree(package, folder / "package")
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps",
            "--no-build-isolation", "--target", folder / "installed", folder / "package",
        ],
        check=True,
    )  # fmt: skip
    return folder / "installed"
