"""Records of benches: every attempt is a line of ``results/NAME.jsonl``, appended, never replaced.

A line is a `Bar` with where it came from: date, device, processor, the commit it was measured at,
which is on main, and a hash of the sources it rests on. A row is stale where that hash is not
today's.
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
from pathlib import Path

from slipstream_bench.rows import Bar

RESULTS = Path("benchmarks") / "results"
_MEASURED = ("src", "native", "benchmarks/slipstream_bench")
_MAIN = ("main", "origin/main")


@dataclass(frozen=True)
class Origin:
    """Where rows that are measured now come from; attributes as `Bar` has them."""

    date: str
    commit: str
    processor: str
    sources: str

    def of(self, bar: Bar) -> Bar:
        """`bar` with its origin; on the CPU if it does not name its device."""
        return replace(bar, source="now", device=bar.device or "cpu", **asdict(self))


def origin(entry: str) -> Origin:
    """Of what the bench of ``package.room.module:function`` measures now."""
    return Origin(
        time.strftime("%Y-%m-%d", time.gmtime()), commit(), processor(), sources_hash(entry)
    )


def read(path: Path) -> list[Bar]:
    """All attempts, the oldest first; none where nothing was recorded.

    A last line that a killed run left torn is no attempt.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [Bar(**json.loads(line)) for line in lines[:-1]]


def append(path: Path, bar: Bar) -> None:
    """Add one attempt, behind whatever whole lines there are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":  # a killed run's torn line
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(asdict(bar), ensure_ascii=False).encode() + b"\n")


def nearest(bars: Iterable[Bar], processor: str) -> dict[str, Bar]:
    """The newest attempt of each row by name: on `processor` if there is one, or on another."""
    rows: dict[str, Bar] = {}
    for bar in bars:
        if bar.processor == processor or rows.get(bar.bar, bar).processor != processor:
            rows[bar.bar] = bar
    return rows


def commit() -> str:
    """The commit that the working tree stands at, or ``"unknown"`` outside a clone."""
    return _git("rev-parse", "--short=12", "HEAD") or "unknown"


def why_not_recordable() -> str:
    """Why what is measured now cannot be recorded; empty where it can.

    A record names a commit at which it can be measured again: one on main, with nothing changed.
    """
    if commit() == "unknown":
        return "this is no clone of slipstream"
    if _git("status", "--porcelain", "--", *_MEASURED):
        return "what is measured is not committed"
    if not any(_git("merge-base", "--is-ancestor", "HEAD", main) is not None for main in _MAIN):
        return "the commit is not on main"
    return ""


def unknown_commits(bars: Iterable[Bar]) -> set[str]:
    """Commits that rows name and that are not in the history of the working tree."""
    named = {bar.commit for bar in bars}
    return {
        one for one in named if not one or _git("merge-base", "--is-ancestor", one, "HEAD") is None
    }


def sources_hash(entry: str) -> str:
    """What the bench of ``package.room.module:function`` rests on, as 16 hexadecimal digits.

    Its own modules, the rooms of slipstream they import, and the native engine; empty where the
    sources are not at hand.
    """
    bench = _modules(entry)
    rooms = rooms_of(bench)
    if not rooms:
        return ""
    roots = [*map(Path, rooms), Path("native")]
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


def rooms_of(modules: Iterable[Path]) -> list[str]:
    """Folders and files under ``src`` that modules import."""
    rooms = set()
    for file in modules:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            rooms |= {_room(name) for name in names if name.startswith("slipstream.")}
    return sorted(filter(None, rooms))


def _room(module: str) -> str:
    """The room of a module as a path in a clone: one of `techniques` is a room of its own."""
    parts = module.split(".")
    path = Path("src", *parts[: 3 if parts[1] == "techniques" else 2])
    file = path.with_suffix(".py")
    return str(path) if path.is_dir() else str(file) if file.is_file() else ""


def processor() -> str:
    """Model, widest vectors and cores; models that share a name are told apart by their family."""
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
    """What git prints, or None where it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
