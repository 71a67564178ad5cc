"""Plain tables for the terminal, Markdown, HTML and JSON."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from html import escape
from typing import IO, TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

# Share of a column's width that wrapping between words may save before rows are stacked: of the
# first column, which readers scan for names, and of other text columns.
_FOLDED_FIRST = 1 / 3
_FOLDED = 1 / 2
# A word ends after a space and before the "+" that joins parts of a name; a lone punctuation mark
# belongs to the preceding word.
_WORDS = re.compile(r"[^\s+]+(?:\s[^\w\s+](?=\s|$))?|\+[^\s+]*(?:\s[^\w\s+](?=\s|$))?")
# Width of piped output, which fits every column of our tables.
_PIPED_WIDTH = 160

_BLOCKS = "▁▂▃▄▅▆▇█"

# Characters that a terminal interprets: control characters and changes of the writing direction.
_CONTROLS = (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPED = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CONTROLS}
_ESCAPED = {code: shown for code, shown in _ESCAPED.items() if chr(code) not in "\n\t"}
# JSON escapes the ones below 32 itself.
_JSON_ESCAPED = {code: f"\\u{code:04x}" for code in _CONTROLS if code >= 32}

Align = Literal["left", "right"]
T = TypeVar("T")


def escape_control(text: str) -> str:
    """Escape control characters in `text`, except newlines and tabs."""
    return text.translate(_ESCAPED)


def sparkline(values: Sequence[float], most: float | None = None) -> str:
    """Draw values as blocks of proportional height; empty for fewer than two values.

    Args:
        most: value of the highest block; None for the largest value.
    """
    if len(values) < 2:
        return ""
    full = most or max(values) or 1.0
    shares = (min(max(value / full, 0.0), 1.0) for value in values)
    return "".join(_BLOCKS[round((len(_BLOCKS) - 1) * share)] for share in shares)


def console_for(file: IO[str], *, soft_wrap: bool = False) -> Console:
    """Return a console that writes to `file` and raises `BrokenPipeError` if the reader is gone.

    rich would end the process instead, with work unfinished.
    """
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipeConsole(file=file, highlight=False, soft_wrap=soft_wrap)


@dataclass(frozen=True)
class Drawing:
    """A cell drawn as SVG in HTML, and shown as `text` elsewhere."""

    svg: str
    text: str

    def __str__(self) -> str:
        return self.text

    @classmethod
    def interval(
        cls, low: float, middle: float, high: float, ends: tuple[float, float], text: str
    ) -> Drawing:
        """Draw an interval and its middle on a logarithmic axis between `ends`.

        A dashed line marks 1, no change.
        """

        def x(value: float) -> float:
            share = math.log(value / ends[0]) / math.log(ends[1] / ends[0])
            return 4 + 192 * min(max(share, 0.0), 1.0)

        return cls(
            f'<svg width="200" height="14" role="img" aria-label="{escape(text)}">'
            f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="0" y2="14" stroke="currentColor" '
            'stroke-dasharray="2 2" opacity="0.5"/>'
            f'<line x1="{x(low):.1f}" x2="{x(high):.1f}" y1="7" y2="7" stroke="#c46a10" '
            f'stroke-width="3"/><circle cx="{x(middle):.1f}" cy="7" r="4" fill="#c46a10"/></svg>',
            text,
        )

    @classmethod
    def share(cls, share: float, text: str) -> Drawing:
        """Draw a bar that fills the given share of the cell."""
        return cls(
            f'<svg width="100" height="10" role="img" aria-label="{escape(text)}">'
            '<rect width="100" height="10" rx="2" fill="currentColor" opacity="0.1"/>'
            f'<rect width="{100 * min(max(share, 0.0), 1.0):.1f}" height="10" rx="2" '
            f'fill="#4a90d9"/></svg> {escape(text)}',
            text,
        )


@dataclass(frozen=True)
class Column:
    """Heading and alignment of a column, and whether a narrow terminal may drop it."""

    name: str
    align: Align = "left"
    optional: bool = False


@dataclass(frozen=True)
class Field(Column, Generic[T]):
    """A column with a function from a value to its cell; see `Table.of`."""

    cell: Callable[[T], object] = str

    @classmethod
    def of(cls, name: str, cell: Callable[[T], object], optional: bool = False) -> Field[T]:
        """Return a left-aligned field."""
        return cls(name, "left", optional, cell)

    @classmethod
    def number(cls, name: str, cell: Callable[[T], object], optional: bool = False) -> Field[T]:
        """Return a right-aligned field."""
        return cls(name, "right", optional, cell)


@dataclass(frozen=True)
class Table:
    """Rows of text under named columns, with notes below.

    Attributes:
        rows: a tuple of cells per row, as long as `columns`; cells are shown with ``str``.
        notes: lines printed below the table, such as units, conditions and sources.
        lead: sentences printed above the title: the conclusion.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[object]]
    title: str = ""
    notes: Sequence[str] = field(default=())
    lead: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells under {len(self.columns)} columns")

    @classmethod
    def of(
        cls,
        values: Iterable[T],
        fields: Sequence[Field[T]],
        title: str = "",
        notes: Iterable[str] = (),
    ) -> Table:
        """Return a table with a row per value and a cell per field; empty notes are dropped."""
        rows = [tuple(field.cell(value) for field in fields) for value in values]
        return cls(fields, rows, title, [note for note in notes if note])

    def to_markdown(self) -> str:
        """Format as a GitHub-flavoured Markdown table with a bold title and notes below."""
        lines = [line for sentence in self.lead for line in (sentence, "")]
        lines += [f"**{self.title}**", ""] if self.title else []
        lines.append("| " + " | ".join(_markdown(column.name) for column in self.columns) + " |")
        rule = ["---:" if column.align == "right" else "---" for column in self.columns]
        lines.append("| " + " | ".join(rule) + " |")
        lines += ["| " + " | ".join(_markdown(_cell(c)) for c in row) + " |" for row in self.rows]
        if self.notes:
            lines += ["", *self.notes]
        return escape_control("\n".join(lines) + "\n")

    def to_html(self) -> str:
        """Format as an HTML table with a caption and notes below, without scripts or style sheets.

        Cells are escaped, except for a `Drawing`.
        """

        def cells(tag: str, values: Sequence[object]) -> str:
            return "".join(
                f'<{tag} class="{column.align}" style="text-align:{column.align}">'
                f"{value.svg if isinstance(value, Drawing) else escape(_cell(value))}</{tag}>"
                for column, value in zip(self.columns, values, strict=True)
            )

        caption = escape(self.title)
        title = f'<caption style="text-align:left"><b>{caption}</b></caption>' if caption else ""
        head = cells("th", [column.name for column in self.columns])
        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        notes = "".join(
            f'<p class="notes"><small>{escape(note)}</small></p>' for note in self.notes
        )
        lead = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.lead)
        table = f"{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        return f"{lead}<table>{table}</table>{notes}"

    def to_records(self) -> list[dict[str, object]]:
        """Return a dictionary per row from column name to unformatted cell."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def print(self, file: IO[str] | None = None) -> None:
        """Print to `file` or stdout, fitted to the width; names columns that do not fit."""
        rows = [tuple(escape_control(_cell(cell)) for cell in row) for row in self.rows]
        notes, lead = (
            [escape_control(line) for line in lines] for lines in (self.notes, self.lead)
        )
        Table(self.columns, rows, escape_control(self.title), notes, lead)._print(file)

    def _print(self, file: IO[str] | None) -> None:
        from rich.cells import cell_len
        from rich.table import Table as RichTable
        from rich.text import Text

        console = console_for(file or sys.stdout)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = _PIPED_WIDTH
        for sentence in self.lead:
            console.print(Text(sentence))
        if not self.rows and self.notes:
            # Headings without rows add nothing to the notes.
            console.print(Text(self.title, style="bold"))
            self._print_below(console, [])
            return
        columns = list(range(len(self.columns)))
        dropped: list[str] = []
        widths = [max(cell_len(line) for line in self._lines(c)) for c in columns]

        def missing() -> int:
            """Return the number of characters by which the columns exceed the width."""
            return sum(widths[c] + 2 for c in columns) - 2 - console.width

        # Drop optional columns from the right until the table fits.
        while missing() > 0:
            optional = [c for c in columns if self.columns[c].optional]
            if not optional:
                break
            dropped.insert(0, self.columns[optional[-1]].name)
            columns.remove(optional[-1])
        excess = missing()
        # Names are wrapped last.
        for c in (*reversed(columns[1:]), columns[0]):
            saved = min(max(excess, 0), widths[c] - self._min_width(c, widths[c]))
            widths[c] -= saved
            excess -= saved
        if excess > 0 and len(columns) > 1:
            self._print_stacked(console, columns)
            self._print_below(console, dropped)
            return
        if self.title:
            # Separately, since a grid's title is wrapped to the width of the grid.
            console.print(Text(self.title, style="bold"))
        grid = RichTable(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
        for c in columns:
            grid.add_column(
                Text(_wrapped(self.columns[c].name, widths[c])), justify=self.columns[c].align,
                overflow="fold",
            )  # fmt: skip
        for row in self.rows:
            grid.add_row(*(Text(_wrapped(_cell(row[c]), widths[c])) for c in columns))
        console.print(grid)
        self._print_below(console, dropped)

    def _print_stacked(self, console: Console, columns: list[int]) -> None:
        """Print each row's first cell on a line, and the other cells with headings below it."""
        from rich.cells import cell_len
        from rich.text import Text

        if self.title:
            console.print(Text(self.title, style="bold"))
        for row in self.rows:
            console.print(Text(_cell(row[columns[0]]), overflow="fold"))
            line = ""
            for c in columns[1:]:
                value = _cell(row[c]).strip()
                if not value:
                    continue
                part = f"  {self.columns[c].name} {value}"
                if line and cell_len(line + part) > console.width:
                    console.print(Text(line, style="dim"))
                    line = ""
                line += part
            if line:
                console.print(Text(line, style="dim"))

    def _print_below(self, console: Console, dropped: list[str]) -> None:
        from rich.text import Text

        for note in self.notes:
            console.print(Text(note, style="dim"))
        if dropped:
            hidden = ", ".join(dropped)
            console.print(Text(f"(columns that do not fit: {hidden}; --json has all)", style="dim"))

    def _min_width(self, c: int, width: int) -> int:
        """Return the minimum width of column `c`, whose full width is `width`."""
        from rich.cells import cell_len

        if self.columns[c].align == "right":
            return width
        longest = max(cell_len(word) for line in self._lines(c) for word in _words(line))
        folded = _FOLDED if c else _FOLDED_FIRST
        return min(width, max(longest, math.ceil(width * (1 - folded))))

    def _lines(self, c: int) -> list[str]:
        return [self.columns[c].name, *(n for row in self.rows for n in _cell(row[c]).splitlines())]


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _words(line: str) -> list[str]:
    """Split `line` into words, each with the spaces before it."""
    ends = [match.end() for match in _WORDS.finditer(line)]
    return [line[a:b] for a, b in itertools.pairwise([0, *ends])] or [line]


def _wrapped(text: str, width: int) -> str:
    """Wrap `text` to `width`; longer words are not split."""
    from rich.cells import cell_len

    lines = []
    for line in text.splitlines():
        lines.append("")
        for word in _words(line):
            if lines[-1] and cell_len(lines[-1] + word) > width:
                lines.append(word.lstrip())
            else:
                lines[-1] += word
    return "\n".join(lines)


def _markdown(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def to_json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """Format as JSON, indented by two spaces; see `json_values`."""
    return json.dumps(json_values(value), indent=2, ensure_ascii=False).translate(_JSON_ESCAPED)


def json_values(value: Any) -> Any:
    """Convert `value` to what JSON can represent.

    NaN and infinities become null. Mappings, sequences, sets, dataclasses and arrays are converted
    recursively, other objects to text.
    """
    # First, since a StrEnum is also text and an IntEnum also a number.
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
    # `tolist` of NumPy and torch returns plain numbers, without importing either here.
    if hasattr(value, "tolist"):
        return json_values(value.tolist())
    return str(value)
