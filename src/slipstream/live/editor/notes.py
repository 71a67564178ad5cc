"""What is said beside a file's lines: made once an analysis, so that asking for it is quick."""

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

# Of the step: what is not worth a note of its own.
_LEAST = 0.005
_SHOWN = 24
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Note:
    """A text beside a line.

    Attributes:
        line: from 0, of the text that was analysed.
        title: short, on one line.
        hover: Markdown.
    """

    line: int
    title: str
    hover: str = ""


@dataclass(frozen=True)
class Notes:
    """What is said of one file.

    Attributes:
        lines: of the text that was analysed.
        blocks: of its classes and functions.
        hints: of its lines.
    """

    lines: tuple[str, ...]
    blocks: tuple[Note, ...]
    hints: tuple[Note, ...]


@dataclass
class History:
    """How long lines took in earlier analyses; lines are known by their file and text."""

    _times: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, texts: Mapping[str, str], costs: Costs) -> None:
        """Another analysis, of files with these texts by path."""
        lines = {path: lines_of(text) for path, text in texts.items()}
        for one in costs.lines:
            if (text := _text(lines.get(one.path, ()), one.line - 1)) is not None:
                self._times.setdefault((one.path, text), []).append(one.total_ns)

    def sparkline(self, path: str, text: str) -> str:
        """The times of a line, oldest first; empty where there is one or none."""
        return sparkline(self._times.get((path, text.strip()), ())[-_SHOWN:])


def make_notes(path: str, text: str, costs: Costs, history: History) -> Notes:
    """What is said of the file at `path`, whose `text` was analysed.

    Args:
        path: absolute.
    """
    lines = lines_of(text)
    cost_of = {one.line - 1: one for one in costs.lines if one.path == path}
    step = costs.step_ns or 1.0
    hints = [
        Note(
            number,
            _short(one, step),
            _line_hover(one, costs, history.sparkline(path, _text(lines, number) or "")),
        )
        for number, one in sorted(cost_of.items())
        if one.total_ns >= _LEAST * step or one.peak_bytes >= _LEAST * max(costs.peak_bytes, 1)
    ]
    blocks = [
        note
        for definition, name in _definitions(text)
        if (note := _block(definition, name, path, cost_of, costs)) is not None
    ]
    return Notes(lines, tuple(blocks), tuple(hints))


def describe(share: float, cost: LineCost | ModuleCost) -> str:
    """As ``18 % · 12.3 ms forward · 21 ms backward · 44 MB``."""
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
    """The step in one line."""
    parts = [f"{format_duration(costs.step_ns)} per step"]
    if costs.samples:
        parts += [f"{costs.samples} samples", f"{costs.throughput:,.0f} samples/s"]
    if costs.peak_bytes:
        parts.append(f"{format_bytes(costs.peak_bytes)} at most")
    return " · ".join(parts)


def _short(one: LineCost, step_ns: float) -> str:
    parts = []
    if one.total_ns:
        parts = [format_percent(one.total_ns / step_ns), format_duration(one.total_ns)]
    if one.peak_bytes:
        parts.append(format_bytes(one.peak_bytes))
    return " · ".join(parts)


def _line_hover(one: LineCost, costs: Costs, spark: str) -> str:
    step, peak = costs.step_ns or 1.0, costs.peak_bytes or 1
    rows = [
        f"**{format_percent(one.total_ns / step)} of the step** "
        f"({format_duration(one.total_ns)} of {format_duration(costs.step_ns)})",
        "",
        "| | time | share of step |",
        "|---|---:|---:|",
    ]
    for name, ns in (
        ("forward", one.forward_ns),
        ("backward", one.backward_ns),
        ("update", one.update_ns),
        ("other", one.other_ns),
    ):
        if ns:
            bar = "█" * round(20 * ns / step)
            rows.append(f"| {name} | {format_duration(ns)} | {format_percent(ns / step)} {bar} |")
    rows.append("")
    if one.peak_bytes:
        rows.append(
            f"{format_bytes(one.peak_bytes)} of the {format_bytes(costs.peak_bytes)} that live "
            f"when most does ({format_percent(one.peak_bytes / peak)}).  "
        )
    rows.append(f"{one.calls} operators, measured.  ")
    if one.modules:
        rows.append("Modules: " + ", ".join(f"`{name}`" for name in one.modules) + "  ")
    rows += [f"Called from {' ← '.join(way)}  " for way in one.callers]
    if spark:
        rows.append(f"Over the last analyses: `{spark}`  ")
    return "\n".join(rows)


def _block(
    definition: _Definition, name: str, path: str, cost_of: Mapping[int, LineCost], costs: Costs
) -> Note | None:
    """What is said of a class or function: of a module's class, all of its instances."""
    number, step = definition.lineno - 1, costs.step_ns or 1.0
    end = definition.end_lineno or definition.lineno
    inside = [one for line, one in cost_of.items() if number <= line < end]
    if isinstance(definition, ast.ClassDef):
        instances = _instances(costs.modules, name.rpartition(".")[2], path)
        if instances:
            total = ModuleCost.total(instances)
            title = describe(total.total_ns / step, total)
            if len(instances) > 1:
                title += f" · {len(instances)} instances"
            names = ", ".join(f"`{one.name}`" for one in instances[:8])
            return Note(number, title, f"With all in it: {names}")
    if not inside:
        return None
    total = ModuleCost.total(inside)
    if total.total_ns < _LEAST * step and total.peak_bytes < _LEAST * max(costs.peak_bytes, 1):
        return None
    return Note(number, describe(total.total_ns / step, total), "What its own lines cost.")


def _instances(modules: Sequence[ModuleCost], kind: str, path: str) -> list[ModuleCost]:
    """The outermost modules of a class defined in the file."""
    outermost: list[ModuleCost] = []
    for one in modules:
        within = any(one.name.startswith(f"{outer.name}.") for outer in outermost)
        if one.kind == kind and one.path == path and not within:
            outermost.append(one)
    return outermost


def _definitions(text: str) -> Iterator[tuple[_Definition, str]]:
    """Classes and functions with their qualified names; none of a text that is no Python."""
    try:
        waiting: list[tuple[ast.AST, str]] = [(parse(text), "")]
    except (SyntaxError, ValueError, RecursionError):
        return
    while waiting:
        node, around = waiting.pop(0)
        for child in ast.iter_child_nodes(node):
            name = around
            if isinstance(child, _Definition):
                name = f"{around}.{child.name}" if around else child.name
                yield child, name
            waiting.append((child, name))


def parse(text: str) -> ast.Module:
    """The tree of a text.

    Raises:
        SyntaxError, ValueError, RecursionError: it is no Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _text(lines: Sequence[str], number: int) -> str | None:
    return lines[number].strip() if 0 <= number < len(lines) else None


def read_text(path: str) -> str:
    """A file's text as an editor shows it; empty where it cannot be read."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig", errors="replace")
    except OSError:
        return ""
