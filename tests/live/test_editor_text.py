"""Lines, positions and edits in the units of the language server protocol."""

from __future__ import annotations

import random

import pytest
from lsprotocol import types

from slipstream.live.editor.text import Document, LineMap, line_range, lines_of, position_at, spans


def document(text: str) -> Document:
    return Document("file:///train.py", source=text, version=1)


def changed(text: str, edits: list[tuple[int, int, str]]) -> str:
    for begin, end, new in reversed(edits):
        text = text[:begin] + new + text[end:]
    return text


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", ()),
        ("a", ("a",)),
        ("a\nb\n", ("a\n", "b\n")),
        ("a\r\nb\rc", ("a\r\n", "b\r", "c")),
        ("a\x0cb\u2028c\x85\nd", ("a\x0cb\u2028c\x85\n", "d")),
    ],
)
def test_only_line_endings_of_the_protocol_end_a_line(text: str, lines: tuple[str, ...]) -> None:
    assert lines_of(text) == lines


def test_positions_count_utf16_units() -> None:
    text = "x = '\U0001f600'; batch = 32\r\ny = 1\r\n"
    doc = document(text)
    assert position_at(doc, text.index("32")) == types.Position(0, text.index("32") + 1)
    assert position_at(doc, text.index("y")) == types.Position(1, 0)
    assert position_at(doc, len(text)) == types.Position(2, 0)
    assert position_at(document("ab"), 2) == types.Position(0, 2)


def test_a_range_excludes_indentation_and_line_endings() -> None:
    doc = document("\tx = '\U0001f600'\r\n\n")
    assert line_range(doc, 0) == types.Range(types.Position(0, 1), types.Position(0, 9))
    assert line_range(doc, 7).start.line == 1
    assert line_range(document(""), 3).end == types.Position(0, 0)


def test_a_form_feed_does_not_shift_incremental_changes() -> None:
    """Python's splitlines() would treat it as a line ending."""
    doc = document("a = 1\n\x0cb = 2\nc = 3\n")
    where = types.Range(types.Position(2, 4), types.Position(2, 5))
    doc.apply_change(types.TextDocumentContentChangePartial(text="9", range=where))
    assert doc.source == "a = 1\n\x0cb = 2\nc = 9\n"


def test_lines_are_found_again_after_an_edit() -> None:
    before = lines_of("a\nb\nc\nd\n")
    moved = LineMap(before, lines_of("new\na\nB\nc\nd\n"))
    assert [moved.after_of(line) for line in range(4)] == [1, None, 3, 4]
    assert LineMap(before, ()).after_of(0) is None


def test_many_changed_lines_are_not_compared_one_by_one() -> None:
    before = tuple(f"{i}\n" for i in range(2000))
    after = ("first\n", *(f"{i}!\n" for i in range(1, 1999)), "1999\n")
    found = LineMap(before, after)
    assert found.after_of(1999) == 1999
    assert found.after_of(500) is None


def test_spans_are_the_minimal_replacement() -> None:
    before = "def f(a=1, batch_size=32):\r\n    pass\r\n"
    (only,) = spans(before, before.replace("32", "64"))
    assert (before[only.begin : only.end], only.new) == ("32", "64")


def test_spans_transform_one_text_into_another() -> None:
    chance = random.Random(0)
    alphabet = ["a\n", "b\r\n", "\U0001f600x\n", "\r\n", "c", "\n"]
    for _ in range(300):
        before = "".join(chance.choices(alphabet, k=chance.randrange(9)))
        after = "".join(chance.choices(alphabet, k=chance.randrange(9)))
        found = [(span.begin, span.end, span.new) for span in spans(before, after)]
        assert changed(before, found) == after
        back = [(span.begin, span.end, span.new) for span in spans(after, before)]
        assert changed(after, back) == before
