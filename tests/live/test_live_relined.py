"""Saves that change no code: lines move in texts, recordings and documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from live_workloads import TRAIN

from slipstream.live.relined import moved_lines, relined_document

CODE = TRAIN.replace("return self.second(hidden)", "return self.second(hidden * 2)")
LAYOUT = TRAIN.replace("import torch\n", "# first\n\nimport torch\n", 1).replace(
    "torch.relu(self.first(x))", "torch.relu(\n            self.first(x)\n        )"
)


def line(text: str, words: str) -> int:
    return text[: text.index(words)].count("\n") + 1


def test_lines_of_unchanged_code_are_mapped_to_their_new_places() -> None:
    moved = moved_lines(TRAIN, LAYOUT)
    assert moved is not None
    for words in ("import torch", "class Net", "hidden = ", "return self.second", "batch = "):
        assert moved[line(TRAIN, words)] == line(LAYOUT, words)


@pytest.mark.parametrize("after", [CODE, TRAIN.replace("=16", "=17"), "def broken(:\n", ""])
def test_changed_code_has_no_old_lines(after: str) -> None:
    assert moved_lines(TRAIN, after) is None


def test_invalid_code_does_not_count_as_unchanged() -> None:
    assert moved_lines("def broken(:\n", TRAIN) is None


def test_only_lines_of_a_document_are_changed(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    texts = ["", "aten::relu", "train.py:12", "other.py:12", "train.py:99", "12"]
    (before / "document.json").write_text(json.dumps({"title": "train.py:12", "strings": texts}))
    (before / "columns.deflate").write_bytes(b"columns")
    relined_document(before, after, "document.json", {"train.py": {12: 14}})
    found = json.loads((after / "document.json").read_text())
    assert found["strings"] == ["", "aten::relu", "train.py:14", "other.py:12", "train.py:99", "12"]
    assert found["title"] == "train.py:12"
    assert (after / "columns.deflate").read_bytes() == b"columns"
