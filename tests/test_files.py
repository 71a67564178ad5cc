"""A file is replaced whole, or left as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.files import replacing


def test_what_was_written_takes_the_files_place(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    with replacing(path) as beside:
        beside.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")

    def write() -> None:
        with replacing(path) as beside:
            beside.write_text("half")
            raise ValueError("half")

    with pytest.raises(ValueError, match="half"):
        write()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_its_rights_are_those_of_any_new_file(tmp_path: Path) -> None:
    (plain := tmp_path / "plain").write_text("")
    with replacing(tmp_path / "a.txt") as beside:
        beside.write_text("")
    assert (tmp_path / "a.txt").stat().st_mode == plain.stat().st_mode
