"""Make ``docs/results.md`` from what ``slipstream bench --full`` recorded.

python docs/make_results.py           # write the page
python docs/make_results.py --check   # only say whether it is what the records say
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from slipstream_bench.rows import Bar

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parent / "benchmarks" / "results"
PAGE = HERE / "results.md"
_BEGIN = """\
# Recorded results

slipstream measures itself: each row is a bar, what was measured, and whether the bar holds. What
falls short stands first. A row says how many independent measurements are behind it (n) and on
which machine it was taken; another machine gives other numbers. To measure here:

```
slipstream bench all                  # at most three minutes a name
slipstream bench cli --full           # everything of one name, kept in benchmarks/results
```

This page is made from `benchmarks/results/*.jsonl` by `make results`; do not edit it.

| bench | holds | falls short | not judged | recorded |
|---|--:|--:|--:|---|
"""
_VERDICT = {True: "holds", False: "**falls short**", None: "not judged"}


def read(path: Path) -> list[Bar]:
    """The rows of one bench, those that fall short first."""
    rows = [Bar(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    return sorted(rows, key=lambda bar: bar.holds is not False)


def page(records: Path = RECORDS) -> str:
    """The whole page."""
    benches = {path.stem: read(path) for path in sorted(records.glob("*.jsonl"))}
    summary = "".join(_summary(name, rows) for name, rows in benches.items())
    return _BEGIN + summary + "".join(_section(name, rows) for name, rows in benches.items())


def _summary(name: str, rows: list[Bar]) -> str:
    counts = " | ".join(
        str(sum(bar.holds is verdict for bar in rows)) for verdict in (True, False, None)
    )
    dates = sorted({bar.date for bar in rows})
    return (
        f"| [{name}](#{name}) | {counts} | {' to '.join(dict.fromkeys(dates[:1] + dates[-1:]))} |\n"
    )


def _section(name: str, rows: list[Bar]) -> str:
    parts = [f"\n## {name}\n"]
    for (date, commit, device), group in _by_origin(rows).items():
        parts.append(f"\n{date}, {device}, commit {commit[:7]}:\n\n")
        parts += ["| bar | measured | target | | n | detail |\n", "|---|--:|--:|---|--:|---|\n"]
        parts += [_row(bar) for bar in group if bar.value is not None]
        unmeasured = _by_reason(group)
        if unmeasured:
            parts.append("\nNot measured:\n\n")
            parts += [f"- {why}: {who}\n" for why, who in unmeasured.items()]
    return "".join(parts)


def _by_origin(rows: list[Bar]) -> dict[tuple[str, str, str], list[Bar]]:
    found: dict[tuple[str, str, str], list[Bar]] = defaultdict(list)
    for bar in rows:
        found[bar.date, bar.commit, bar.device].append(bar)
    return found


def _row(bar: Bar) -> str:
    name, target, detail = map(_literal, (bar.bar, bar.target, bar.detail))
    measured = f"{bar.value:.4g} {bar.unit}"
    return f"| {name} | {measured} | {target} | {_VERDICT[bar.holds]} | {bar.n} | {detail} |\n"


def _literal(text: str) -> str:
    """`text` as a cell of a table shows it to the letter."""
    return text.replace("|", "\\|").replace("*", "\\*")


def _by_reason(rows: list[Bar]) -> dict[str, str]:
    """What has no value, by the reason."""
    found: dict[str, list[str]] = defaultdict(list)
    for bar in rows:
        if bar.value is None:
            found[_literal(bar.detail or "no reason was recorded")].append(_literal(bar.bar))
    return {why: ", ".join(who) for why, who in found.items()}


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
