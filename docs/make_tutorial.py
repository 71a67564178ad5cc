"""Run the commands whose output the pages show, and put what they print now in its place.

    python docs/make_tutorial.py

It takes some minutes and is best left alone with the machine. Read the text around the numbers
afterwards: it may have to follow them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
# Pages in the order they are read, each with the packages it tells its reader to install.
PAGES = {"tutorial.md": (), "frameworks.md": (), "your_own_technique.md": ("technique_package",)}
SHOWN = re.compile(r"^```console\n\$ ([^\n]*)\n.*?^```$", re.MULTILINE | re.DOTALL)
_WIDTH = "124"


def environment(folder: Path) -> dict[str, str]:
    """A wide terminal, a history and packages of its own."""
    return {
        **os.environ,
        "COLUMNS": _WIDTH,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "packages"),
        "SLIPSTREAM_STORE": str(folder / "results.db"),
    }


def install(package: str, folder: Path) -> None:
    """Install an example's package beside the copy of the examples."""
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    source = str(folder / "examples" / package)
    subprocess.run([sys.executable, *command, str(folder / "packages"), source], check=True)


def printed(command: str, folder: Path) -> str:
    """What `command` writes to its output, without blanks at the ends of lines.

    Raises:
        subprocess.CalledProcessError: it fails.
    """
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environment(folder), check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())


def main() -> None:
    """Bring every page up to date."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(EXAMPLES, folder / "examples")
        for page, packages in PAGES.items():
            for package in packages:
                install(package, folder)
            path = HERE / page
            text = SHOWN.sub(
                lambda one: f"```console\n$ {one[1]}\n{printed(one[1], folder)}\n```",
                path.read_text("utf-8"),
            )
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
