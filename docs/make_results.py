"""Generate ``docs/results.md`` and a page per bench from the recorded benchmarks.

python docs/make_results.py           # write the pages
python docs/make_results.py --check   # exit with 1 if they are out of date
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from slipstream_bench import records
from slipstream_bench.rows import Bar, Standing

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parent / "benchmarks" / "results"
SUMMARY = Path("results.md")
_STANDINGS: tuple[Standing, ...] = get_args(Standing)
_BEGIN = f"""\
# Recorded results

slipstream measures its own performance. `slipstream bench NAME` measures one part on your machine:

```
slipstream bench all                  # at most three minutes per name
slipstream bench cli --full           # all rows of one name, appended to benchmarks/results
```

The table counts the rows of each bench by their newest measurement. *At the bar* means that the
measurement's own noise spans the target. `make results` generates these pages from
`benchmarks/results/*.jsonl`; do not edit them.

| bench | {" | ".join(_STANDINGS)} | recorded |
|---|{"--:|" * len(_STANDINGS)}---|
"""
_BENCH = """\
# Recorded results: {name}

`slipstream bench {name} --full`. Rows that fall short come first. *n* is the number of independent
measurements, *when* the date and commit of the newest one, and *held* the share of all recorded
attempts that met the target. Each processor and device has its own table. See [all
benches](../results.md).
"""
_ORDER = {standing: rank for rank, standing in enumerate(reversed(_STANDINGS[:3]))}


def pages(folder: Path = RECORDS) -> dict[Path, str]:
    """Return the text of every page by its path below ``docs``."""
    benches = {path.stem: records.read(path) for path in sorted(folder.glob("*.jsonl"))}
    summary = _BEGIN + "".join(_summary(name, attempts) for name, attempts in benches.items())
    details = {_page_of(name): _details(name, attempts) for name, attempts in benches.items()}
    return {SUMMARY: summary, **details}


def _page_of(bench: str) -> Path:
    return Path("results") / f"{bench}.md"


def _summary(name: str, attempts: list[Bar]) -> str:
    """Return the bench's row, which counts the newest attempts on all processors."""
    newest = [bars[-1] for bars in _by_row(attempts).values()]
    counts = Counter(bar.standing for bar in newest)
    dates = sorted({bar.date for bar in newest})
    cells = [f"[{name}]({_page_of(name)})", *(str(counts[standing]) for standing in _STANDINGS)]
    return f"| {' | '.join(cells)} | {' to '.join(dict.fromkeys(dates[:1] + dates[-1:]))} |\n"


def _details(name: str, attempts: list[Bar]) -> str:
    """Return the bench's page, with a table per processor and device."""
    tables: dict[tuple[str, str], list[list[Bar]]] = defaultdict(list)
    for (_, processor, device), bars in _by_row(attempts).items():
        tables[processor, device].append(bars)
    parts = [_BENCH.format(name=name)]
    for (processor, device), rows in tables.items():
        rows.sort(key=lambda bars: _ORDER.get(bars[-1].standing, len(_ORDER)))
        parts.append(f"\n## {processor}{'' if device == 'cpu' else f', {device}'}\n\n")
        if any(bars[-1].value is not None for bars in rows):
            parts.append("| bar | measured | target | | n | when | held | detail |\n")
            parts.append("|---|--:|--:|---|--:|---|--:|---|\n")
            parts += [_row(bars) for bars in rows if bars[-1].value is not None]
        if unmeasured := _by_reason(bars[-1] for bars in rows):
            parts.append("\nNot measured:\n\n")
            parts += [f"- {reason}: {', '.join(bars)}\n" for reason, bars in unmeasured.items()]
    return "".join(parts)


def _by_row(attempts: Iterable[Bar]) -> dict[tuple[str, str, str], list[Bar]]:
    """Group attempts by name, processor and device, oldest first."""
    rows: dict[tuple[str, str, str], list[Bar]] = defaultdict(list)
    for bar in attempts:
        rows[bar.bar, bar.processor, bar.device].append(bar)
    return rows


def _row(attempts: list[Bar]) -> str:
    bar = attempts[-1]
    name, target, detail = map(_literal, (bar.bar, bar.target, bar.detail))
    standing = "**falls short**" if bar.standing == "falls short" else bar.standing
    judged = [attempt.holds for attempt in attempts if attempt.holds is not None]
    held = f"{sum(judged)} of {len(judged)}" if judged else ""
    when = f"{bar.date} {bar.commit[:7]}"
    cells = [name, f"{bar.value:.4g} {bar.unit}", target, standing, bar.n, when, held, detail]
    return f"| {' | '.join(map(str, cells))} |\n"


def _literal(text: str) -> str:
    """Escape `text` for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("*", "\\*")


def _by_reason(bars: Iterable[Bar]) -> dict[str, list[str]]:
    """Group the names of bars without a value by the reason."""
    names: dict[str, list[str]] = defaultdict(list)
    for bar in bars:
        if bar.value is None:
            names[_literal(bar.detail or "no reason was recorded")].append(_literal(bar.bar))
    return names


def main() -> None:
    """Write the pages, or check them."""
    expected = pages()
    if sys.argv[1:] == ["--check"]:
        if current() != expected:
            sys.exit("docs/results.md or a page in docs/results is out of date; try: make results")
    elif sys.argv[1:]:
        sys.exit("usage: python docs/make_results.py [--check]")
    else:
        for path in current().keys() - expected.keys():
            (HERE / path).unlink()
        (HERE / "results").mkdir(exist_ok=True)
        for path, text in expected.items():
            (HERE / path).write_text(text, encoding="utf-8")


def current() -> dict[Path, str]:
    """Return the pages on disk by their path below ``docs``."""
    files = [*HERE.glob(str(SUMMARY)), *HERE.glob("results/*.md")]
    return {file.relative_to(HERE): file.read_text("utf-8") for file in files}


if __name__ == "__main__":
    main()
