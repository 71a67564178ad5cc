"""Make ``docs/results.md`` from what ``slipstream bench --full`` recorded.

python docs/make_results.py           # write the page
python docs/make_results.py --check   # only say whether it is what the records say
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
PAGE = HERE / "results.md"
_STANDINGS: tuple[Standing, ...] = get_args(Standing)
_BEGIN = f"""\
# Recorded results

slipstream measures itself: each row is a bar, what was measured last, and whether the bar holds;
*at the bar* is what its own noise leaves open. What falls short stands first. A row says how many
independent measurements are behind it (n), when and at which commit it was taken, and how many of
all recorded attempts held. Each processor and each device has tables of its own: another machine
gives other numbers. To measure here:

```
slipstream bench all                  # at most three minutes a name
slipstream bench cli --full           # everything of one name, kept in benchmarks/results
```

`slipstream bench NAME` marks the recorded rows that rest on sources which have changed since. This
page is made from `benchmarks/results/*.jsonl` by `make results`; do not edit it.

| bench | {" | ".join(_STANDINGS)} | recorded |
|---|{"--:|" * len(_STANDINGS)}---|
"""
_ORDER = {standing: rank for rank, standing in enumerate(reversed(_STANDINGS[:3]))}


def page(folder: Path = RECORDS) -> str:
    """The whole page."""
    benches = {path.stem: records.read(path) for path in sorted(folder.glob("*.jsonl"))}
    summary = "".join(_summary(name, attempts) for name, attempts in benches.items())
    return _BEGIN + summary + "".join(_section(*one) for one in benches.items())


def _summary(name: str, attempts: list[Bar]) -> str:
    """A row over the newest attempts, on whichever processor."""
    newest = [bars[-1] for bars in _by_row(attempts).values()]
    counts = Counter(bar.standing for bar in newest)
    dates = sorted({bar.date for bar in newest})
    cells = [f"[{name}](#{name})", *(str(counts[standing]) for standing in _STANDINGS)]
    return f"| {' | '.join(cells)} | {' to '.join(dict.fromkeys(dates[:1] + dates[-1:]))} |\n"


def _section(name: str, attempts: list[Bar]) -> str:
    """A table a processor and device."""
    tables: dict[tuple[str, str], list[list[Bar]]] = defaultdict(list)
    for (_, processor, device), bars in _by_row(attempts).items():
        tables[processor, device].append(bars)
    parts = [f"\n## {name}\n"]
    for (processor, device), rows in tables.items():
        rows.sort(key=lambda bars: _ORDER.get(bars[-1].standing, len(_ORDER)))
        parts.append(f"\n{processor}{'' if device == 'cpu' else f', {device}'}:\n\n")
        if any(bars[-1].value is not None for bars in rows):
            parts.append("| bar | measured | target | | n | when | held | detail |\n")
            parts.append("|---|--:|--:|---|--:|---|--:|---|\n")
            parts += [_row(bars) for bars in rows if bars[-1].value is not None]
        if unmeasured := _by_reason(bars[-1] for bars in rows):
            parts.append("\nNot measured:\n\n")
            parts += [f"- {why}: {', '.join(bars)}\n" for why, bars in unmeasured.items()]
    return "".join(parts)


def _by_row(attempts: Iterable[Bar]) -> dict[tuple[str, str, str], list[Bar]]:
    """Attempts by name, processor and device, which are never one row; the newest last."""
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
    """`text` as a cell of a table shows it to the letter."""
    return text.replace("|", "\\|").replace("*", "\\*")


def _by_reason(bars: Iterable[Bar]) -> dict[str, list[str]]:
    """What has no value, by the reason."""
    names: dict[str, list[str]] = defaultdict(list)
    for bar in bars:
        if bar.value is None:
            names[_literal(bar.detail or "no reason was recorded")].append(_literal(bar.bar))
    return names


def main() -> None:
    """Write the page, or check it."""
    wanted = page()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text("utf-8") != wanted:
            sys.exit("docs/results.md is not what benchmarks/results says; try: make results")
    elif sys.argv[1:]:
        sys.exit("usage: python docs/make_results.py [--check]")
    else:
        PAGE.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
