"""Plain tables, written once and shown in a terminal, as Markdown, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Literal

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
        lines.append("| " + " | ".join(column.name for column in self.columns) + " |")
        rule = ["---:" if column.align == "right" else "---" for column in self.columns]
        lines.append("| " + " | ".join(rule) + " |")
        for row in self.rows:
            cells = [_cell(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row]
            lines.append("| " + " | ".join(cells) + " |")
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join(lines) + "\n"

    def to_records(self) -> list[dict[str, object]]:
        """One dictionary a row, keyed by column name, the cells as they are."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def print(self, file: IO[str] | None = None) -> None:
        """To a terminal (or `file`), fitted to its width; columns that do not fit are named."""
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        console = Console(file=file or sys.stdout, highlight=False, soft_wrap=False)
        columns = list(range(len(self.columns)))
        dropped: list[str] = []
        # Two spaces between columns; drop the optional ones from the right until it fits.
        while sum(self._width(c) + 2 for c in columns) > console.width:
            optional = [c for c in columns if self.columns[c].optional]
            if not optional:
                break
            dropped.insert(0, self.columns[optional[-1]].name)
            columns.remove(optional[-1])
        grid = RichTable(
            title=self.title or None, title_justify="left", title_style="bold", box=None,
            header_style="dim", pad_edge=False, padding=(0, 2, 0, 0),
        )  # fmt: skip
        for c in columns:
            grid.add_column(
                self.columns[c].name, justify=self.columns[c].align, overflow="fold"
            )
        for row in self.rows:
            grid.add_row(*(Text(_cell(row[c])) for c in columns))
        console.print(grid)
        for note in self.notes:
            console.print(Text(note, style="dim"))
        if dropped:
            hidden = ", ".join(dropped)
            console.print(Text(f"(too narrow for: {hidden}; --json has all)", style="dim"))

    def _width(self, c: int) -> int:
        lines = [self.columns[c].name]
        for row in self.rows:
            lines += _cell(row[c]).splitlines()
        return max(len(line) for line in lines)


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def to_json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """Stable JSON for people and programs: sorted keys off, two spaces, no NaN (null instead)."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str)


def _finite(value: Any) -> Any:
    # JSON has no NaN or infinity; programs that read ours should not have to know Python's.
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
