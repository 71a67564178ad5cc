"""Notes next to the lines of a file, created once per analysis, so that requests are fast."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.live.costs import Costs, LineCost, ModuleCost
from slipstream.live.editor.text import lines_of
from slipstream.tables import sparkline
from slipstream.units import format_bytes, format_duration, format_percent

# Minimum share of the step or the peak for a note.
_MIN_SHARE = 0.005
_MAX_TIMES = 24
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Note:
    """A note at a line.

    Attributes:
        line: line of the analysed text, from 0.
        title: one line of text.
        hover: details in Markdown.
    """

    line: int
    title: str
    hover: str = ""


@dataclass(frozen=True)
class Notes:
    """Notes of one file.

    Attributes:
        lines: lines of the analysed text.
        blocks: notes of classes and functions.
        hints: notes of lines.
    """

    lines: tuple[str, ...]
    blocks: tuple[Note, ...]
    hints: tuple[Note, ...]


@dataclass
class History:
    """Times of lines in earlier analyses, by file and text of the line."""

    _times: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, texts: Mapping[str, str], costs: Costs) -> None:
        """Add an analysis of files with these texts by path."""
        lines = {path: lines_of(text) for path, text in texts.items()}
        for cost in costs.lines:
            if (text := _text(lines.get(cost.path, ()), cost.line - 1)) is not None:
                self._times.setdefault((cost.path, text), []).append(cost.total_ns)

    def sparkline(self, path: str, text: str) -> str:
        """Return a sparkline of a line's times, oldest first; empty for fewer than two."""
        return sparkline(self._times.get((path, text.strip()), ())[-_MAX_TIMES:])


def make_notes(path: str, text: str, costs: Costs, history: History) -> Notes:
    """Return the notes of the file at absolute `path`, whose `text` was analysed."""
    lines = lines_of(text)
    cost_of = {cost.line - 1: cost for cost in costs.lines if cost.path == path}
    step = costs.step_ns or 1.0
    hints = [
        Note(
            number,
            _short(cost, step),
            _line_hover(cost, costs, history.sparkline(path, _text(lines, number) or "")),
        )
        for number, cost in sorted(cost_of.items())
        if _is_notable(cost, costs)
    ]
    blocks = [
        note
        for definition, name in _definitions(text)
        if (note := _block(definition, name, path, cost_of, costs)) is not None
    ]
    return Notes(lines, tuple(blocks), tuple(hints))


def describe(share: float, cost: LineCost | ModuleCost) -> str:
    """Return text such as ``18 % · 12.3 ms forward · 21 ms backward · 44 MB``."""
    parts = [format_percent(share)]
    for ns, phase in (
        (cost.forward_ns, "forward"),
        (cost.backward_ns, "backward"),
        (cost.update_ns, "update"),
    ):
        if ns:
            parts.append(f"{format_duration(ns)} {phase}")
    if cost.peak_bytes:
        parts.append(format_bytes(cost.peak_bytes))
    return " · ".join(parts)


def summary(costs: Costs) -> str:
    """Return the cost of the step in one line."""
    parts = [f"{format_duration(costs.step_ns)} per step"]
    if costs.samples:
        parts += [f"{costs.samples} samples", f"{costs.throughput:,.0f} samples/s"]
    if costs.peak_bytes:
        parts.append(f"{format_bytes(costs.peak_bytes)} peak")
    return " · ".join(parts)


def _is_notable(cost: LineCost | ModuleCost, costs: Costs) -> bool:
    if cost.total_ns >= _MIN_SHARE * (costs.step_ns or 1.0):
        return True
    return cost.peak_bytes >= _MIN_SHARE * max(costs.peak_bytes, 1)


def _short(cost: LineCost, step_ns: float) -> str:
    parts = []
    if cost.total_ns:
        parts = [format_percent(cost.total_ns / step_ns), format_duration(cost.total_ns)]
    if cost.peak_bytes:
        parts.append(format_bytes(cost.peak_bytes))
    return " · ".join(parts)


def _line_hover(cost: LineCost, costs: Costs, spark: str) -> str:
    step, peak = costs.step_ns or 1.0, costs.peak_bytes or 1
    rows = [
        f"**{format_percent(cost.total_ns / step)} of the step** "
        f"({format_duration(cost.total_ns)} of {format_duration(costs.step_ns)})",
        "",
        "| | time | share of step |",
        "|---|---:|---:|",
    ]
    for name, ns in (
        ("forward", cost.forward_ns),
        ("backward", cost.backward_ns),
        ("update", cost.update_ns),
        ("other", cost.other_ns),
    ):
        if ns:
            bar = "█" * round(20 * ns / step)
            rows.append(f"| {name} | {format_duration(ns)} | {format_percent(ns / step)} {bar} |")
    rows.append("")
    if cost.peak_bytes:
        rows.append(
            f"{format_bytes(cost.peak_bytes)} of {format_bytes(costs.peak_bytes)} peak memory "
            f"({format_percent(cost.peak_bytes / peak)}).  "
        )
    rows.append(f"{cost.calls} operators, measured.  ")
    if cost.modules:
        rows.append("Modules: " + ", ".join(f"`{name}`" for name in cost.modules) + "  ")
    rows += [f"Called from {' ← '.join(stack)}  " for stack in cost.callers]
    if spark:
        rows.append(f"Over the last analyses: `{spark}`  ")
    return "\n".join(rows)


def _block(
    definition: _Definition, name: str, path: str, cost_of: Mapping[int, LineCost], costs: Costs
) -> Note | None:
    """Return the note of a function or class; of a module class, with all its instances."""
    number, step = definition.lineno - 1, costs.step_ns or 1.0
    end = definition.end_lineno or definition.lineno
    inside = [cost for line, cost in cost_of.items() if number <= line < end]
    if isinstance(definition, ast.ClassDef):
        instances = _instances(costs.modules, name.rpartition(".")[2], path)
        if instances:
            total = ModuleCost.total(instances)
            title = describe(total.total_ns / step, total)
            if len(instances) > 1:
                title += f" · {len(instances)} instances"
            names = ", ".join(f"`{module.name}`" for module in instances[:8])
            return Note(number, title, f"Including submodules: {names}")
    if not inside:
        return None
    total = ModuleCost.total(inside)
    if not _is_notable(total, costs):
        return None
    return Note(number, describe(total.total_ns / step, total), "Cost of its own lines.")


def _instances(modules: Sequence[ModuleCost], kind: str, path: str) -> list[ModuleCost]:
    """Return the outermost modules of class `kind`, defined in the file at `path`."""
    outermost: list[ModuleCost] = []
    for module in modules:
        nested = any(module.name.startswith(f"{outer.name}.") for outer in outermost)
        if module.kind == kind and module.path == path and not nested:
            outermost.append(module)
    return outermost


def _definitions(text: str) -> Iterator[tuple[_Definition, str]]:
    """Yield classes and functions with qualified names; none for invalid Python."""
    try:
        pending: list[tuple[ast.AST, str]] = [(parse(text), "")]
    except (SyntaxError, ValueError, RecursionError):
        return
    while pending:
        node, scope = pending.pop(0)
        for child in ast.iter_child_nodes(node):
            name = scope
            if isinstance(child, _Definition):
                name = f"{scope}.{child.name}" if scope else child.name
                yield child, name
            pending.append((child, name))


def parse(text: str) -> ast.Module:
    """Parse a text without warnings.

    Raises:
        SyntaxError, ValueError, RecursionError: `text` is not valid Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _text(lines: Sequence[str], number: int) -> str | None:
    return lines[number].strip() if 0 <= number < len(lines) else None


def read_text(path: str) -> str:
    """Return a file's text as an editor shows it; empty for an unreadable file."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig", errors="replace")
    except OSError:
        return ""
