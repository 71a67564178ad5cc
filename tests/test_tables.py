"""A table shows the same in a terminal, as Markdown and as JSON."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.tables import Column, Table, json_values, sparkline, to_json


def _printed(table: Table, monkeypatch: pytest.MonkeyPatch, width: int) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    file = io.StringIO()
    table.print(file)
    return file.getvalue()


def test_a_row_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="a row of 1 cells under 2 columns"):
        Table([Column("a"), Column("b")], [(1,)])


def test_renders_markdown() -> None:
    table = Table(
        [Column("a|b"), Column("n", "right")], [("x|y\nz", 1.5), (None, 2)], "Title", ["note"]
    )
    assert table.to_markdown() == (
        "**Title**\n\n| a\\|b | n |\n| --- | ---: |\n| x\\|y<br>z | 1.5 |\n| - | 2 |\n\nnote\n"
    )


def test_the_lead_is_above_the_title(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table([Column("a")], [(1,)], "title", lead=["first <this>"])
    assert _printed(table, monkeypatch, 80).splitlines()[:2] == ["first <this>", "title"]
    assert table.to_markdown().startswith("first <this>\n\n**title**")
    assert table.to_html().startswith("<p>first &lt;this&gt;</p><table>")


def test_without_rows_only_the_notes_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table([Column("technique"), Column("gain")], [], title="predicted", notes=["none."])
    assert _printed(table, monkeypatch, 80).split() == ["predicted", "none."]


def test_nothing_is_interpreted_as_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table([Column("ratio [low, high]")], [("[bold]x[/bold]",)], "t [red]itle", ["[n]"])
    shown = _printed(table, monkeypatch, 80)
    for text in ("ratio [low, high]", "[bold]x[/bold]", "t [red]itle", "[n]"):
        assert text in shown


def test_a_narrow_terminal_drops_optional_columns_and_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Table(
        [Column("kept"), Column("first", optional=True), Column("second", optional=True)],
        [("x" * 20, "y" * 20, "z" * 20)],
    )
    wide = _printed(table, monkeypatch, 100)
    assert "y" * 20 in wide
    assert "too narrow" not in wide
    middle = _printed(table, monkeypatch, 50)
    assert "y" * 20 in middle
    assert re.search(r": second;.*--json\b", middle)
    narrow = _printed(table, monkeypatch, 30)
    assert "x" * 20 in narrow
    assert "first, second" in " ".join(narrow.split())


def test_rows_too_wide_for_one_line_are_stacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Table(
        [Column("technique"), Column("speed-up", "right"), Column("verdict")],
        [("channels_last+amp:bf16", "1.42x", "worth it"), ("threads:2", "0.98x", "")],
        "predicted",
        ["a note"],
    )
    assert _printed(table, monkeypatch, 30).splitlines() == [
        "predicted",
        "channels_last+amp:bf16",
        "  speed-up 1.42x",
        "  verdict worth it",
        "threads:2",
        "  speed-up 0.98x",
        "a note",
    ]
    wide = _printed(table, monkeypatch, 60).splitlines()
    assert wide[2].split() == ["channels_last+amp:bf16", "1.42x", "worth", "it"]


_NAMES = Table(
    [Column("technique"), Column("gain", "right"), Column("verdict")],
    [
        ("batch_size:x2+fused_optimizer:fused *", "1.18x", "worth it"),
        ("amp:bf16", "0.34x", "not worth it here: slower"),
    ],
)


@pytest.mark.parametrize("width", range(20, 90))
def test_a_name_is_never_split_within_a_word_or_from_its_mark(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    lines = _printed(_NAMES, monkeypatch, width).splitlines()
    if width > len("batch_size:x2+fused_optimizer:fused *"):
        first = [line.split("  ")[0] for line in lines]
        whole = "batch_size:x2+fused_optimizer:fused *" in first
        parted = [part in first for part in ("batch_size:x2", "+fused_optimizer:fused *")]
        assert whole or all(parted), lines
    assert all(len(line.rstrip()) <= width for line in lines)


def test_other_columns_shrink_before_a_name_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # The full table takes 37 + 5 + 25 characters, and two between columns.
    assert len(_printed(_NAMES, monkeypatch, 71).splitlines()) == 3
    narrower = [line.rstrip() for line in _printed(_NAMES, monkeypatch, 65).splitlines()]
    assert narrower[1:] == [
        "batch_size:x2+fused_optimizer:fused *  1.18x  worth it",
        "amp:bf16                               0.34x  not worth it here:",
        "                                              slower",
    ]


def test_a_closed_pipe_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Left(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Table([Column("a")], [(1,)]).print(Left())


def test_no_cell_is_lost_at_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _printed(Table([Column("word")], [("abcdefghij" * 5,)]), monkeypatch, 20)
    assert "".join(shown.split()) == "word" + "abcdefghij" * 5


def test_records_preserve_the_values() -> None:
    assert Table([Column("a"), Column("b")], [(1, None)]).to_records() == [{"a": 1, "b": None}]


class _Colour(StrEnum):
    GREEN = "green"


@pytest.mark.parametrize(
    ("text", "escape"),
    [
        ("\x1b[2Jred", r"\x1b[2J"), ("a\rb", r"a\x0db"), ("\x9b31m", r"\x9b31m"), ("\x07", r"\x07"),
        ("\u202eevil", r"\u202eevil"),
    ],
)  # fmt: skip
def test_control_characters_are_escaped(
    text: str, escape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table([Column("a")], [(text,)], f"title {text}", [f"note {text}"], [f"lead {text}"])
    shown = _printed(table, monkeypatch, 80)
    document = to_json({"a": text})
    for output in (shown, table.to_markdown(), document):
        assert not set(output) & set("\x1b\r\x9b\x07\u202e")
    assert shown.count(escape) == 4
    assert json.loads(document) == {"a": text}


@dataclass(frozen=True)
class _Point:
    x: float
    colour: _Colour


def test_json_has_numbers_as_numbers() -> None:
    value = {
        _Colour.GREEN: np.int64(3),
        "f": np.float32(0.5),
        "a": np.arange(2),
        "p": _Point(math.nan, _Colour.GREEN),
        "s": {"b", "a"},
        "n": None,
        "t": True,
    }
    assert json.loads(to_json(value)) == {
        "green": 3,
        "f": 0.5,
        "a": [0, 1],
        "p": {"x": None, "colour": "green"},
        "s": ["a", "b"],
        "n": None,
        "t": True,
    }


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@given(_plain)
def test_json_values_round_trip(value: object) -> None:
    assert json.loads(to_json([value])) == [value]


@given(st.sampled_from([math.nan, math.inf, -math.inf, np.float64("nan"), np.float32("inf")]))
def test_values_that_json_lacks_become_null(value: float) -> None:
    assert json_values([value]) == [None]


def test_values_are_blocks_of_proportional_height() -> None:
    assert sparkline([1.0]) == ""
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([0.0, 1.0, 2.0, 7.0]) == "▁▂▃█"
    assert sparkline([-1.0, 7.0, 20.0], 14.0) == "▁▅█"
