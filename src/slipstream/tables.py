"""Plain tables, written once and shown in a terminal, as Markdown, or as JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import IO, Any, Literal

# What is piped or logged has no width of its own; wide enough for every column of ours.
_PIPED_WIDTH = 160

Align = Literal["left", "right"]


@dataclass(frozen=True)
class Column:
    """A column's heading, its alignment, and whether a narrow terminal may drop it."""

    name: str
    align: Align = "left"
    optional: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text under named columns, with notes below.

    Attributes:
        rows: one tuple of cells a row, as long as `columns`; cells are shown with ``str``.
        notes: lines printed under the table: units, conditions, what a number rests on.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[object]]
    title: str = ""
    notes: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells under {len(self.columns)} columns")

    def to_markdown(self) -> str:
        """A GitHub-flavoured Markdown table, the title as bold text, the notes below."""
        lines = [f"**{self.title}**", ""] if self.title else []
        lines.append("| " + " | ".join(_markdown(column.name) for column in self.columns) + " |")
        rule = ["---:" if column.align == "right" else "---" for column in self.columns]
        lines.append("| " + " | ".join(rule) + " |")
        lines += ["| " + " | ".join(_markdown(_cell(c)) for c in row) + " |" for row in self.rows]
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join(lines) + "\n"

    def to_records(self) -> list[dict[str, object]]:
        """One dictionary a row, keyed by column name, the cells as they are."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def print(self, file: IO[str] | None = None) -> None:
        """To a terminal (or `file`), fitted to its width; columns that do not fit are named."""
        from rich.cells import cell_len
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        console = Console(file=file or sys.stdout, highlight=False, soft_wrap=False)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = _PIPED_WIDTH
        columns = list(range(len(self.columns)))
        dropped: list[str] = []
        # Two spaces between columns; drop the optional ones from the right until it fits.
        widths = [max(cell_len(line) for line in self._lines(c)) for c in columns]
        while sum(widths[c] + 2 for c in columns) > console.width:
            optional = [c for c in columns if self.columns[c].optional]
            if not optional:
                break
            dropped.insert(0, self.columns[optional[-1]].name)
            columns.remove(optional[-1])
        grid = RichTable(
            title=Text(self.title) if self.title else None, title_justify="left",
            title_style="bold", box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0),
        )  # fmt: skip
        for c in columns:
            grid.add_column(
                Text(self.columns[c].name), justify=self.columns[c].align, overflow="fold"
            )
        for row in self.rows:
            grid.add_row(*(Text(_cell(row[c])) for c in columns))
        console.print(grid)
        for note in self.notes:
            console.print(Text(note, style="dim"))
        if dropped:
            hidden = ", ".join(dropped)
            console.print(Text(f"(too narrow for: {hidden}; --json has all)", style="dim"))

    def _lines(self, c: int) -> list[str]:
        return [self.columns[c].name, *(n for row in self.rows for n in _cell(row[c]).splitlines())]


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _markdown(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def to_json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """JSON for people and programs: keys in the order given, two spaces, see `json_values`."""
    return json.dumps(json_values(value), indent=2, ensure_ascii=False)


def json_values(value: Any) -> Any:
    """`value` with nothing in it that JSON lacks: null for NaN and infinities, text for the rest.

    Mappings, sequences, sets, dataclasses and NumPy's scalars and arrays become what they hold.
    """
    # Before all else: a StrEnum is text and an IntEnum a number, by their values.
    if isinstance(value, Enum):
        return json_values(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(json_values(key)): json_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((json_values(item) for item in value), key=str)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_values(getattr(value, field.name)) for field in fields(value)}
    # NumPy and torch, neither of which is imported for this: `tolist` gives plain numbers.
    if hasattr(value, "tolist"):
        return json_values(value.tolist())
    return str(value)
