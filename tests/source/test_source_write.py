"""A file on disk is the complete old or new one, with a backup next to it."""

from __future__ import annotations

import os
import re
import signal
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.errors import WorkloadError
from slipstream.source import Source, undo, write

_OLD = "x = 1\r\nname = 'é'"
_NEW = "x = 2\r\nname = 'é'"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_bytes(_OLD.encode())
    return path


def edited(path: Path) -> Source:
    source = Source.read(path)
    return source.replace(source.tree.body[0], "x = 2")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_new_file_has_the_mode_of_the_old_one_and_a_backup(file: Path) -> None:
    file.chmod(0o754)
    before = file.stat()
    written = write(edited(file))
    assert file.read_bytes() == _NEW.encode()
    assert file.stat().st_mode == before.st_mode
    assert (written.path, written.backup) == (file, file.with_name("train.py.orig"))
    assert written.backup.read_bytes() == _OLD.encode()
    assert written.backup.stat().st_mode == before.st_mode
    assert written.backup.stat().st_mtime_ns == before.st_mtime_ns
    assert names(file.parent) == {"train.py", "train.py.orig"}


def test_a_backup_is_never_overwritten(file: Path) -> None:
    file.with_name("train.py.orig").write_text("somebody's")
    assert write(edited(file)).backup.name == "train.py.orig.1"
    file.write_bytes(_OLD.encode())
    assert write(edited(file)).backup.name == "train.py.orig.2"
    assert file.with_name("train.py.orig").read_text() == "somebody's"


def test_undo_reverts_one_edit_and_loses_nothing(file: Path) -> None:
    for number in (2, 3):
        source = Source.read(file)
        write(source.replace(source.tree.body[0], f"x = {number}"))
    undone = undo(file)
    assert file.read_bytes() == _NEW.encode()
    assert undone.backup is not None
    assert undone.backup.read_bytes() == _NEW.replace("2", "3").encode()
    assert undone.earlier == 1
    last = undo(file)
    assert (last.backup, last.earlier) == (None, 0)
    assert file.read_bytes() == _OLD.encode()
    assert names(file.parent) == {"train.py", "train.py.undone"}
    assert undone.backup.read_bytes() == _NEW.replace("2", "3").encode()
    with pytest.raises(WorkloadError, match=r"no 'train\.py\.orig'"):
        undo(file)
    assert file.read_bytes() == _OLD.encode()


def test_changes_between_two_undos_are_kept(file: Path) -> None:
    for number in (2, 3):
        source = Source.read(file)
        write(source.replace(source.tree.body[0], f"x = {number}"))
    first = undo(file)
    file.write_bytes(b"x = 4\n")
    second = undo(file)
    assert file.read_bytes() == _OLD.encode()
    assert first.backup is not None
    assert second.backup is not None
    assert first.backup.read_bytes() == _NEW.replace("2", "3").encode()
    assert second.backup.read_bytes() == b"x = 4\n"


def test_an_edit_undone_twice_is_backed_up_once(file: Path) -> None:
    for _ in range(2):
        write(edited(file))
        undo(file)
    assert names(file.parent) == {"train.py", "train.py.undone"}


def test_a_link_still_points_to_the_file(file: Path) -> None:
    link = file.with_name("link.py")
    link.symlink_to(file)
    written = write(edited(link))
    assert link.is_symlink()
    assert file.read_bytes() == _NEW.encode()
    assert written.backup == file.with_name("train.py.orig")


def _changed_by_somebody(path: Path) -> Source:
    source = edited(path)
    path.write_bytes(b"x = 3\n")
    return source


def _gone(path: Path) -> Source:
    source = edited(path)
    path.unlink()
    return source


def _read_only(path: Path) -> Source:
    path.chmod(0o444)
    return edited(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_changed_by_somebody, "changed while"),
        (_gone, "cannot be written: No such file"),
        (_read_only, "is read-only"),
    ],
)
def test_unsafe_writes_are_refused(
    file: Path, make: Callable[[Path], Source], message: str
) -> None:
    source = make(file)
    before = {path: path.read_bytes() for path in file.parent.iterdir()}
    with pytest.raises(WorkloadError, match=message) as caught:
        write(source)
    assert caught.value.remedy
    assert {path: path.read_bytes() for path in file.parent.iterdir()} == before


def test_a_last_moment_change_is_detected(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = edited(file)
    synced = os.fsync

    def save_in_the_editor(fd: int) -> None:
        synced(fd)
        file.write_bytes(b"x = 3\n")

    monkeypatch.setattr(os, "fsync", save_in_the_editor)
    with pytest.raises(WorkloadError, match="changed while"):
        write(source)
    assert file.read_bytes() == b"x = 3\n"
    assert not [name for name in names(file.parent) if name.endswith(".tmp")]


@pytest.mark.parametrize("folder", ["site-packages/lib", "dist-packages"])
def test_a_file_of_an_installed_package_is_left_alone(tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder / "train.py"
    path.parent.mkdir(parents=True)
    path.write_bytes(_OLD.encode())
    for attempt in (lambda: write(edited(path)), lambda: undo(path)):
        with pytest.raises(WorkloadError, match=rf"'{re.escape(str(path))}'.*\binstalled\b"):
            attempt()
    assert names(path.parent) == {"train.py"}


def test_the_standard_library_is_left_alone() -> None:
    path = Path(sysconfig.get_path("stdlib")) / "this.py"
    before = path.read_bytes()
    with pytest.raises(WorkloadError, match=rf"'{re.escape(str(path))}'.*\binstalled\b"):
        write(Source.of(before, path))
    assert path.read_bytes() == before


@pytest.mark.parametrize("function", ["open", "fsync", "link", "utime", "replace"])
def test_ctrl_c_leaves_the_complete_old_or_new_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    source, original = edited(file), getattr(os, function)

    def interrupted(*args: object, **kwargs: object) -> object:
        original(*args, **kwargs)
        # The handler of Ctrl-C, as Python runs it between two instructions.
        signal.raise_signal(signal.SIGINT)
        return None

    monkeypatch.setattr(os, function, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(source)
    monkeypatch.undo()
    if function == "replace":
        assert file.read_bytes() == _NEW.encode()
        assert file.with_name("train.py.orig").read_bytes() == _OLD.encode()
    else:
        assert file.read_bytes() == _OLD.encode()
        # A backup is complete.
        assert {path.read_bytes() for path in file.parent.iterdir()} == {_OLD.encode()}
    assert not [name for name in names(file.parent) if name.endswith(".tmp")]
