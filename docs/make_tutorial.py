"""Run the commands whose output the pages show, and replace the shown output by the new one.

    python docs/make_tutorial.py

It takes some minutes; run it on an idle machine, and adapt the text around the numbers afterwards.
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

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
# Pages in reading order, each with the example packages that its commands need.
PAGES = {
    "README.md": (),
    "docs/tutorial.md": (),
    "docs/frameworks.md": (),
    "docs/your_own_technique.md": ("technique_package",),
}
SHOWN = re.compile(r"^```console\n\$ ([^\n]*)\n.*?^```$", re.MULTILINE | re.DOTALL)
_WIDTH = "124"


def environment(folder: Path) -> dict[str, str]:
    """Return variables for a wide terminal, and a separate history and package folder."""
    return {
        **os.environ,
        "COLUMNS": _WIDTH,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "packages"),
        "SLIPSTREAM_STORE": str(folder / "results.db"),
    }


def install(package: str, folder: Path) -> None:
    """Install an example package for the commands run in `folder`."""
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    source = str(folder / "examples" / package)
    subprocess.run([sys.executable, *command, str(folder / "packages"), source], check=True)


def printed(command: str, folder: Path) -> str:
    """Return what `command` prints, without trailing blanks.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=environment(folder), check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    # The store as it is named without SLIPSTREAM_STORE.
    text = done.stdout.replace(str(folder / "results.db"), ".slipstream/results.db")
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def main() -> None:
    """Update every page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(EXAMPLES, folder / "examples")
        for page, packages in PAGES.items():
            for package in packages:
                install(package, folder)
            path = ROOT / page
            text = SHOWN.sub(
                lambda shown: f"```console\n$ {shown[1]}\n{printed(shown[1], folder)}\n```",
                path.read_text("utf-8"),
            )
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
