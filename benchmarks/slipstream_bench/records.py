"""Records of benches: every attempt is a line of ``results/NAME.jsonl``, appended, never replaced.

A line is a `Bar` with its origin: date, device, processor, the commit on main at which it was
measured, and a hash of the sources that it depends on. A row is stale if that hash differs from the
current one.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from operator import methodcaller
from pathlib import Path

from slipstream_bench.rows import Bar

RESULTS = Path("benchmarks") / "results"
_MEASURED = ("src", "native", "benchmarks/slipstream_bench")
_MAIN = ("main", "origin/main")


@dataclass(frozen=True)
class Origin:
    """Origin of rows that are measured now; attributes as in `Bar`."""

    date: str
    commit: str
    processor: str
    sources: str

    def of(self, bar: Bar) -> Bar:
        """Return `bar` with this origin; its device is the CPU if it names none."""
        return replace(bar, source="now", device=bar.device or "cpu", **asdict(self))


def origin(entry: str) -> Origin:
    """Return the origin of new rows of the bench ``package.folder.module:function``."""
    return Origin(
        time.strftime("%Y-%m-%d", time.gmtime()), commit(), processor(), sources_hash(entry)
    )


def read(path: Path) -> list[Bar]:
    """Return all attempts, the oldest first; an empty list if the file is missing.

    The incomplete last line of a killed run is ignored.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [Bar(**json.loads(line)) for line in lines[:-1]]


def append(path: Path, bar: Bar) -> None:
    """Append an attempt after the last complete line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":  # an incomplete line of a killed run
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        # Rows computed with NumPy have its numbers.
        line = json.dumps(asdict(bar), ensure_ascii=False, default=methodcaller("item"))
        file.write(line.encode() + b"\n")


def nearest(bars: Iterable[Bar], processor: str) -> dict[str, Bar]:
    """Return the newest attempt of each row by name, preferably on `processor`."""
    rows: dict[str, Bar] = {}
    for bar in bars:
        if bar.processor == processor or rows.get(bar.bar, bar).processor != processor:
            rows[bar.bar] = bar
    return rows


def commit() -> str:
    """Return the commit of the working tree, or ``"unknown"`` outside a clone."""
    return _git("rev-parse", "--short=12", "HEAD") or "unknown"


def why_not_recordable() -> str:
    """Return why new rows cannot be recorded; empty if they can.

    A record names a commit that reproduces it: one on main, without uncommitted changes.
    """
    if commit() == "unknown":
        return "this is not a clone of slipstream"
    if _git("status", "--porcelain", "--", *_MEASURED):
        return "the measured sources have uncommitted changes"
    if not any(_git("merge-base", "--is-ancestor", "HEAD", main) is not None for main in _MAIN):
        return "the commit is not on main"
    return ""


def unknown_commits(bars: Iterable[Bar]) -> set[str]:
    """Return commits that rows name and that are not in the history of the working tree."""
    named = {bar.commit for bar in bars}
    return {
        name
        for name in named
        if not name or _git("merge-base", "--is-ancestor", name, "HEAD") is None
    }


def sources_hash(entry: str) -> str:
    """Hash the sources of the bench ``package.folder.module:function``: 16 hexadecimal digits.

    These are its own modules, the packages of slipstream that they import, and the native engine;
    empty if the sources are missing.
    """
    bench = _modules(entry)
    packages = packages_of(bench)
    if not packages:
        return ""
    roots = [*map(Path, packages), Path("native")]
    below = (file for root in roots for file in ([root] if root.is_file() else root.rglob("*")))
    files = {file for file in below if file.is_file() and "__pycache__" not in file.parts}
    digest = hashlib.sha256()
    for file in sorted(files | set(bench)):
        digest.update(f"{file}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def _modules(entry: str) -> list[Path]:
    module = Path("benchmarks", *entry.partition(":")[0].split("."))
    alone = module.parent.name == "systems"
    files = [module.with_suffix(".py")] if alone else module.parent.glob("*.py")
    return [file for file in files if file.is_file()]


def packages_of(modules: Iterable[Path]) -> list[str]:
    """Return folders and files under ``src`` that modules import."""
    packages = set()
    for file in modules:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            packages |= {_package(name) for name in names if name.startswith("slipstream.")}
    return sorted(filter(None, packages))


def _package(module: str) -> str:
    """Return the package of a module as a path in a clone; each of `techniques` is separate."""
    parts = module.split(".")
    path = Path("src", *parts[: 3 if parts[1] == "techniques" else 2])
    file = path.with_suffix(".py")
    return str(path) if path.is_dir() else str(file) if file.is_file() else ""


def processor() -> str:
    """Return model, widest vectors and cores; the family distinguishes models that share a name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    fields = {
        name: re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE)
        for name in ("model name", "cpu family", "model", "flags")
    }
    model, family, number, flags = (match[1] if match else "" for match in fields.values())
    vectors = next((isa for flag, isa in _VECTORS if flag in flags.split()), "")
    parts = [
        model or platform.machine(),
        f"family {family} model {number}" if family else "",
        vectors,
    ]
    return ", ".join([*filter(None, parts), f"{os.cpu_count()} cores"])


_VECTORS = (("avx512f", "AVX-512"), ("avx2", "AVX2"))


def _git(*arguments: str) -> str | None:
    """Return what git prints, or None if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
