"""bench: measure the bars, keep the full runs, show both."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, UnknownNameError
from slipstream.files import replacing
from slipstream_bench.rows import Bar, Bench, BenchOptions, not_judged

GROUP = "slipstream.benches"
RESULTS = Path("benchmarks") / "results"
QUICK_S = 170.0
"""Seconds after which a quick run begins no further row, so that it ends within three minutes."""
_TIME_IS_UP = "the time of a quick run was used up; --full measures it"


def benches() -> dict[str, Any]:
    """Entry points of every bench by name."""
    return {point.name: point for point in sorted(entry_points(group=GROUP))}


def purposes() -> dict[str, str]:
    """What each bench is for: the first line of its module, which is read and not imported."""
    return {name: _purpose(str(point.value)) for name, point in benches().items()}


def _purpose(entry: str) -> str:
    """Empty where the module of ``package.room.module:function`` is not found as a file."""
    package, _, rest = entry.partition(":")[0].partition(".")
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder, *rest.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
                return re.sub(r"^``[^`]*``: ", "", text.partition("\n")[0]).rstrip(".")
    return ""


def bench(
    name: str,
    *,
    full: bool = False,
    only: str = "",
    results: Path = RESULTS,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[Bar]:
    """Measure the rows of one bench, each yielded when it is known.

    A full run is written to ``results/NAME.jsonl`` row by row and goes on where it was killed
    (for the same commit). A quick run begins no row after `QUICK_S` seconds, says which it left
    out, and shows what is recorded.

    Raises:
        UnknownNameError: no such bench; the nearest is suggested.
        SlipstreamError: the bench cannot be loaded.
    """
    known = benches()
    if name not in known:
        raise UnknownNameError("bench", name, known)
    try:
        run: Bench = known[name].load()
    except ImportError as error:
        raise SlipstreamError(
            f"the bench '{name}' cannot be loaded: {error}", where=known[name].value
        ) from error
    path = results / f"{name}.jsonl"
    commit, date, device = _commit(), time.strftime("%Y-%m-%d", time.gmtime()), _device()
    recorded = read_results(path)
    if full:
        kept = [bar for bar in recorded if bar.commit == commit] if not only else recorded
        done = {} if only else {bar.bar: bar for bar in kept}
        rows = {bar.bar: bar for bar in kept}
        options = BenchOptions(
            full=True, only=only, done=done, recorded=dict(rows), progress=progress
        )
        yield from (replace(bar, source="recorded") for bar in rows.values() if not only)
        for bar in run(options):
            bar = replace(bar, source="now", device=device, commit=commit, date=date)
            rows[bar.bar] = bar
            write_results(path, list(rows.values()))
            yield bar
        return
    options = BenchOptions(only=only, progress=progress, budget_s=QUICK_S)
    for bar in run(options):
        yield replace(bar, device=device, commit=commit, date=date)
    for bar in recorded:
        if only in bar.bar:
            notes = [bar.detail] if bar.detail else []
            if bar.bar in options.left_out:
                notes.append(f"not measured now: {_TIME_IS_UP}")
            if changed_since(bar.commit, str(known[name].value)):
                notes.append("STALE: the room changed since")
            yield replace(bar, source="recorded", detail="; ".join(notes))
    for left in options.left_out.keys() - {bar.bar for bar in recorded}:
        yield replace(not_judged(left, "", "", _TIME_IS_UP), commit=commit, date=date)


def read_results(path: Path) -> list[Bar]:
    """The rows a full run recorded; none when there was no such run."""
    if not path.exists():
        return []
    return [Bar(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def write_results(path: Path, bars: Sequence[Bar]) -> None:
    """Replace the recorded rows, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(bar), ensure_ascii=False) + "\n" for bar in bars]
    with replacing(path) as beside:
        beside.write_text("".join(lines), encoding="utf-8")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit() -> str:
    return _git("rev-parse", "--short=12", "HEAD") or "unknown"


def changed_since(commit: str, entry: str) -> bool:
    """Whether what the bench of ``package.room.module:function`` rests on differs from `commit`."""
    rests_on = rooms_of(entry)
    if not rests_on:
        return False
    changed = _git("diff", "--name-only", commit, "--", *rests_on, "native")
    return changed is None or bool(changed)


def rooms_of(entry: str) -> list[str]:
    """Folders and files under ``src`` whose modules the bench imports; none outside a clone."""
    bench = Path("benchmarks", *entry.partition(":")[0].split("."))
    files = (
        [bench.with_suffix(".py")] if bench.parent.name == "systems" else bench.parent.glob("*.py")
    )
    found = set()
    for file in filter(Path.is_file, files):
        for node in ast.walk(ast.parse(file.read_bytes())):
            names = (
                [node.module]
                if isinstance(node, ast.ImportFrom)
                else ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
            )
            found |= {_room(name) for name in names if name and name.startswith("slipstream.")}
    return sorted(filter(None, found))


def _room(module: str) -> str:
    """The room of a module as a path in a clone: one of `techniques` is a room of its own."""
    parts = module.split(".")
    path = Path("src", *parts[: 3 if parts[1] == "techniques" else 2])
    file = path.with_suffix(".py")
    return str(path) if path.is_dir() else str(file) if file.is_file() else ""


def _device() -> str:
    """The processor, without the host's name."""
    import os

    model = "unknown processor"
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        import platform

        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"
