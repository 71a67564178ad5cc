"""A file is replaced completely, or unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from slipstream.errors import UsageError
from slipstream.files import (
    leftovers,
    read_array,
    remove_leftovers,
    replacing,
    temporary_folder,
)


def test_new_content_takes_the_files_place(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    with replacing(path) as temporary:
        temporary.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")

    def write() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise ValueError("half")

    with pytest.raises(ValueError, match="half"):
        write()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_its_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (plain := tmp_path / "plain").write_text("")
    with replacing(tmp_path / "a.txt") as temporary:
        temporary.write_text("")
    assert (tmp_path / "a.txt").stat().st_mode == plain.stat().st_mode


def _zeros(path: Path) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, x=np.zeros(64 << 20, np.uint8))


def _huge(path: Path) -> None:
    np.save(path, np.zeros(9))
    path.write_bytes(path.read_bytes().replace(b"(9,)", b"(9" + b"0" * 12 + b",)"))


@pytest.mark.parametrize(
    "write",
    [
        Path.touch,
        lambda path: path.write_bytes(b"PK\x03\x04 no zip file"),
        lambda path: np.save(path, np.array([{}], dtype=object)),
        lambda path: np.save(path, np.array(["a text"])),
        lambda path: np.save(path, 3.0),
        _zeros,
        _huge,
    ],
)
def test_a_file_without_a_numeric_array_is_refused(
    write: Callable[[Path], object], tmp_path: Path
) -> None:
    write(path := tmp_path / "a.npy")
    with pytest.raises(UsageError) as caught:
        read_array(path, UsageError)
    assert str(path) in str(caught.value.where)


def test_an_array_is_read_from_either_kind_of_file(tmp_path: Path) -> None:
    x = np.arange(6.0).reshape(2, 3)
    np.save(tmp_path / "a.npy", x)
    np.savez(tmp_path / "a.npz", x=x, y=x + 1)
    for name in ("a.npy", "a.npz"):
        np.testing.assert_array_equal(read_array(tmp_path / name), x)


_KILLED = """
import os, signal
from slipstream.child import Child
from slipstream.files import temporary_folder
with temporary_folder("graph") as folder, Child() as child:
    (folder / "run.slipgraph").touch()
    child.call("slipstream.child:end_descendants")
    print(child.pid, flush=True)
    input()
"""


def test_leftovers_of_a_killed_process_are_removed_and_files_of_a_running_one_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    made = sorted(tmp_path.iterdir())
    assert [path.name.split("-")[1] for path in made] == ["child", "graph"]
    for kind in ("child", "graph"):
        remove_leftovers(kind)
    assert sorted(tmp_path.iterdir()) == made
    process.kill()
    process.communicate()
    psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [])
    with temporary_folder("graph") as folder:
        remove_leftovers("child")
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_user_is_not_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "slipstream-backup-1-planted").mkdir()
    (tmp_path / "slipstream-backup-2-planted").symlink_to(tmp_path)
    assert len(list(leftovers("backup"))) == 1
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert list(leftovers("backup")) == []
