"""Files that user code writes, removes or renames are restored, however the code ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from slipstream.errors import SlipstreamWarning, WorkloadError
from slipstream.workload import backup
from slipstream.workload.backup import back_up, file_backups, restore_files
from slipstream.workload.guard import FileGuard

Fork = Callable[..., Any]
Entries = dict[str, object]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, which is also the current one."""
    folder = tmp_path / "project"
    (folder / "results" / "run1").mkdir(parents=True)
    (folder / "results" / "run1" / "log.csv").write_text("1,2\n")
    (folder / "results" / "best.pt").write_bytes(bytes(range(256)))
    (folder / "checkpoint.pt").write_bytes(b"a model that took a week")
    (folder / "empty").mkdir()
    (folder / "latest").symlink_to("checkpoint.pt")
    (folder / "runs").symlink_to("results")
    monkeypatch.chdir(folder)
    return folder


def snapshot(folder: Path) -> Entries:
    """Return every path, with its bytes, its mode and its time."""
    found: Entries = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = "a folder"
        else:
            status = path.stat()
            found[name] = (path.read_bytes(), status.st_mode, status.st_mtime_ns)
    return found


def code_runs(fork: Fork, folder: Path, code: str, keep_in: Path) -> Any:
    """Run `code` in a fork under a guard of `folder`."""

    def run() -> str:
        with FileGuard(folder, keep_in):
            exec(compile(code, str(folder / "train.py"), "exec"), {"__name__": "__main__"})
        return "ran"

    return fork(run)


CODE = {
    "open w": "open('checkpoint.pt', 'w').write('new')",
    "open a": "open('checkpoint.pt', 'a').write('more')",
    "open r+": "open('checkpoint.pt', 'r+b').write(b'X')",
    "os.open": "import os; os.write(os.open('checkpoint.pt', os.O_WRONLY), b'X')",
    "pathlib": "from pathlib import Path; Path('results/run1/log.csv').write_text('')",
    "bytes path": "open(b'checkpoint.pt', 'wb').write(b'new')",
    "FileIO": "import io; from pathlib import Path; io.FileIO(Path('checkpoint.pt'), 'w')",
    "json": "import json; json.dump({}, open('results/run1/log.csv', 'w'))",
    "every step": "for i in range(5): open('checkpoint.pt', 'w').write(str(i))",
    "through a link": "open('latest', 'w').write('new')",
    "through a linked folder": "open('runs/best.pt', 'w').write('new')",
    "by absolute path": "import os; open(os.path.abspath('checkpoint.pt'), 'w')",
    "from another folder": "import os; os.chdir('results'); open('../checkpoint.pt', 'w')",
    "truncate": "import os; os.truncate('checkpoint.pt', 3)",
    "remove": "import os; os.remove('checkpoint.pt')",
    "remove a link": "import os; os.remove('latest')",
    "another link": "import os; os.remove('latest'); os.symlink('results/best.pt', 'latest')",
    "a link replaces a file": (
        "import os; os.remove('checkpoint.pt'); os.symlink('results/best.pt', 'checkpoint.pt')"
    ),
    "a folder replaces a file": (
        "import os; os.remove('checkpoint.pt'); os.mkdir('checkpoint.pt'); "
        "open('checkpoint.pt/shard', 'w')"
    ),
    "rename": "import os; os.rename('checkpoint.pt', 'old.pt')",
    "write a temporary file and replace": (
        "import os; open('c.tmp', 'w').write('new'); os.replace('c.tmp', 'checkpoint.pt')"
    ),
    "rename a folder": "import os; os.rename('results', 'results.old'); os.mkdir('results')",
    "rmtree": "import shutil; shutil.rmtree('results')",
    "remove an empty folder": "import os; os.rmdir('empty')",
    "move": "import shutil; shutil.move('checkpoint.pt', 'results/run1')",
    "copy over": "import shutil; shutil.copy('results/best.pt', 'checkpoint.pt')",
    "new files and folders": (
        "import os; os.makedirs('new/deep/er'); open('new/deep/er/a', 'w'); open('b', 'w')"
    ),
    "another program writes to a new folder": (
        "import os; os.makedirs('new/deep'); os.system('mkdir new/a; date > new/a/b; date > new/c')"
    ),
    "new hard link": "import os; os.link('checkpoint.pt', 'again.pt')",
    "read-only afterwards": (
        "import os; open('checkpoint.pt', 'w'); os.chmod('checkpoint.pt', 0o400)"
    ),
    "torch.save": "import torch; torch.save([1], 'checkpoint.pt')",
    "torch.save by keyword": (
        "import torch; from pathlib import Path; torch.save(obj=[1], f=Path('checkpoint.pt'))"
    ),
    "torch.serialization.save": "import torch; torch.serialization.save([1], 'new.pt')",
    "torch.jit.save": (
        "import torch, warnings; warnings.simplefilter('ignore')\n"
        "torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), 'checkpoint.pt')"
    ),
    "numpy": "import numpy; numpy.save('results/new.npy', numpy.ones(3))",
    "sqlite": (
        "import sqlite3; c = sqlite3.connect('runs.db'); c.execute('create table t (x)'); c.close()"
    ),
    "only reading": "open('checkpoint.pt').read(); import os; os.listdir('.')",
    "an error half way": "open('checkpoint.pt', 'w'); raise ValueError('half way')",
}


@pytest.mark.parametrize("code", CODE.values(), ids=CODE.keys())
def test_everything_is_restored(fork: Fork, project: Path, code: str) -> None:
    before = snapshot(project)
    with file_backups() as keep_in:
        outcome = code_runs(fork, project, code, keep_in)
        assert outcome.result == "ran" or "half way" in outcome.what
    assert snapshot(project) == before
    assert not keep_in.exists()


def test_an_existing_database_is_restored(fork: Fork, project: Path) -> None:
    import sqlite3

    with sqlite3.connect("runs.db") as connection:
        connection.execute("create table t (x)")
    connection.close()
    before = snapshot(project)
    code = (
        "import sqlite3\n"
        "with sqlite3.connect('runs.db') as c: c.execute('insert into t values (1)')"
    )
    with file_backups() as keep_in:
        assert code_runs(fork, project, code, keep_in).result == "ran"
        assert snapshot(project) != before
    assert snapshot(project) == before


def test_a_project_reached_through_a_link_is_guarded_too(
    fork: Fork, project: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(project)
    before = snapshot(project)
    code = f"open({str(tmp_path / 'link' / 'checkpoint.pt')!r}, 'w')"
    with file_backups() as keep_in:
        code_runs(fork, project, code, keep_in)
    assert snapshot(project) == before


def test_an_unchanged_file_is_not_rewritten(fork: Fork, project: Path) -> None:
    os.link(project / "checkpoint.pt", project / "second name")
    inode = (project / "checkpoint.pt").stat().st_ino
    with file_backups() as keep_in:
        code_runs(fork, project, "open('checkpoint.pt', 'a')", keep_in)
    assert (project / "checkpoint.pt").stat().st_ino == inode


def test_hard_links_of_a_file_are_restored_with_it(fork: Fork, project: Path) -> None:
    os.link(project / "checkpoint.pt", project / "second name")
    with file_backups() as keep_in:
        code_runs(fork, project, "open('checkpoint.pt', 'w')", keep_in)
    assert (project / "second name").read_bytes() == b"a model that took a week"


def test_caches_in_the_home_folder_are_left_alone(
    fork: Fork, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".cache").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    code = "import os; open(os.path.expanduser('~/.cache/downloaded'), 'w').write('much')"
    with file_backups() as keep_in:
        code_runs(fork, project, code, keep_in)
    assert (home / ".cache" / "downloaded").read_text() == "much"


def test_a_file_that_another_program_moved_to_a_new_folder_stays(fork: Fork, project: Path) -> None:
    old = project / "checkpoint.pt"
    content = old.read_bytes()
    os.utime(old, (1e9, 1e9))
    code = "import os; os.mkdir('new'); os.system('mv checkpoint.pt new; date > new/log')"
    with file_backups() as keep_in:
        assert code_runs(fork, project, code, keep_in).result == "ran"
    assert [path.name for path in (project / "new").iterdir()] == ["checkpoint.pt"]
    assert (project / "new" / "checkpoint.pt").read_bytes() == content


def test_the_first_guard_of_a_path_decides_its_restored_state(
    project: Path, tmp_path: Path
) -> None:
    path = project / "checkpoint.pt"
    before = snapshot(project)
    for number in range(3):
        back_up(tmp_path, str(path))
        path.write_text(f"arm {number}")
    restore_files(tmp_path)
    assert snapshot(project) == before


def test_new_folders_can_be_left_for_running_writers(
    fork: Fork, project: Path, tmp_path: Path
) -> None:
    code = "import os; os.mkdir('new'); open('new/a', 'w'); open('checkpoint.pt', 'w')"
    before = snapshot(project)
    with file_backups() as keep_in:
        code_runs(fork, project, code, keep_in)
        restore_files(keep_in, leave_folders=True)
        assert snapshot(project) == {**before, "new": "a folder"}
    assert snapshot(project) == before


def test_a_file_that_cannot_be_backed_up_is_not_overwritten(
    fork: Fork, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = type(shutil.disk_usage("/"))(10, 10, 0)
    monkeypatch.setattr(backup.shutil, "disk_usage", lambda path: full)
    before = snapshot(project)
    with file_backups() as keep_in:
        outcome = code_runs(fork, project, "open('checkpoint.pt', 'w')", keep_in)
    assert "would overwrite" in outcome.what
    assert "disk space" in outcome.error["remedy"]
    assert snapshot(project) == before


def test_a_file_that_cannot_be_restored_is_named_and_its_backup_stays(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    path = project / "checkpoint.pt"
    with ExitStack() as stack:
        keep_in = stack.enter_context(file_backups())
        back_up(keep_in, str(path))
        path.write_text("new")
        monkeypatch.setattr(backup.shutil, "copyfile", refuse)
        with pytest.raises(WorkloadError) as caught:
            stack.close()
    assert str(path) in caught.value.what
    copies = [path for path in keep_in.iterdir() if path.suffix != ".json"]
    assert [copy.read_bytes() for copy in copies] == [b"a model that took a week"]
    assert str(copies[0]) in caught.value.what
    shutil.rmtree(keep_in)


_OWNER = """
import os, signal, subprocess, sys
from slipstream.workload.backup import announce_writer, back_up, file_backups
path = os.path.abspath('checkpoint.pt')
with file_backups() as keep_in:
    writer = subprocess.Popen([sys.executable, '-c', '''
import os, sys, time
from pathlib import Path
from slipstream.workload.backup import announce_writer, back_up
announce_writer(Path(sys.argv[1]))
back_up(Path(sys.argv[1]), sys.argv[2])
while True:
    open(sys.argv[2], 'w').write('half')
    print('written', flush=True)
    time.sleep(0.01)
''', str(keep_in), path], stdout=subprocess.PIPE, start_new_session=True)
    writer.stdout.readline()
    print(keep_in, writer.pid, flush=True)
    END
"""


# Kills its writer, the process that watches over it, and itself.
_ALL_KILLED = """import psutil
    for process in psutil.Process().children():
        process.kill()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _becomes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 600
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def _ended(pid: int) -> bool:
    """Whether the process has ended, even as an orphaned zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _run_owner(end: str) -> tuple[Path, int]:
    """Run `_OWNER`; return the folder of its backups and the process id of its writer."""
    done = subprocess.run(
        [sys.executable, "-c", _OWNER.replace("END", end)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    keep_in, writer = done.stdout.split()
    return Path(keep_in), int(writer)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, here and in processes started from here."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(1)"])
def test_files_are_restored_even_if_our_process_is_killed(project: Path, end: str) -> None:
    before = snapshot(project)
    keep_in, writer = _run_owner(end)
    assert _becomes_true(lambda: not keep_in.exists())
    assert snapshot(project) == before
    assert _becomes_true(lambda: _ended(writer))


def test_the_next_start_restores_files_of_killed_processes(project: Path, temporary: Path) -> None:
    before = snapshot(project)
    _run_owner(_ALL_KILLED)
    assert snapshot(project) != before
    with pytest.warns(SlipstreamWarning, match=r"restored .*checkpoint\.pt'"), file_backups():
        assert snapshot(project) == before
    assert list(temporary.iterdir()) == []


def test_changes_after_the_kill_stay_and_the_backup_is_named(
    project: Path, temporary: Path
) -> None:
    keep_in, _ = _run_owner(_ALL_KILLED)
    killed_s = time.time() - 3600
    os.utime(keep_in, (killed_s, killed_s))
    (project / "checkpoint.pt").write_text("trained since")
    with pytest.warns(SlipstreamWarning) as warned:
        backup.restore_leftovers()
    assert (project / "checkpoint.pt").read_text() == "trained since"
    saved = Path(str(warned[0].message).rpartition(": ")[2])
    assert saved.read_bytes() == b"a model that took a week"
    # Named once.
    backup.restore_leftovers()


def test_damaged_backups_are_moved_aside_once(project: Path, temporary: Path) -> None:
    (folder := temporary / "slipstream-backup-1-ab").mkdir()
    (folder / "cd.json").touch()
    with pytest.warns(SlipstreamWarning, match="are damaged"):
        backup.restore_leftovers()
    backup.restore_leftovers()


def test_backups_in_use_stay(project: Path, temporary: Path) -> None:
    before = snapshot(project)
    with file_backups() as keep_in:
        back_up(keep_in, str(project / "checkpoint.pt"))
        (project / "checkpoint.pt").write_text("new")
        backup.restore_leftovers()
        assert (project / "checkpoint.pt").read_text() == "new"
    assert snapshot(project) == before


def test_a_ctrl_c_right_after_creating_the_folder_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    make = os.mkdir

    def interrupted(path: str, mode: int) -> None:
        make(path, mode)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), file_backups():
        pass
    assert list(tmp_path.iterdir()) == []
