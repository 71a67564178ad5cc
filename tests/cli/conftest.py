"""The command as a user runs it: in another process, with separate output and no traces left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from forks import begin_anew, import_what_steps_need, start_children_as_forks
from slipstream.child import process as children
from slipstream.cli import main

LIMIT_S = 600.0
_GONE_S = 60.0

TRAIN = """\
import torch

def make_workload(batch_size=4, width=16):
    model = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(batch_size, 8), torch.randn(batch_size, 1)
    return model, batch, torch.nn.functional.mse_loss, optimizer
"""


@dataclass(frozen=True)
class Refusal:
    """The parts of the single error that a command ended with, as of `SlipstreamError`.

    Attributes:
        before: what was said before it.
    """

    what: str
    where: str
    remedy: str
    before: str


@dataclass(frozen=True)
class Shell:
    """A folder to run the command in, with separate temporary and cache folders."""

    folder: Path
    environment: dict[str, str]

    @property
    def temporary(self) -> Path:
        """Return the folder for temporary files of the command and all its children."""
        return Path(self.environment["TMPDIR"])

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """Start ``slipstream ARGUMENTS``."""
        command = [str(Path(sys.executable).parent / "slipstream"), *map(str, arguments)]
        defaults: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
            "text": True,
        }
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, **{**defaults, **options}
        )

    def __call__(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run ``slipstream ARGUMENTS`` to its end in a fork of this process, like its children."""
        import_what_steps_need()
        outputs = [self.folder.parent / name for name in ("stdout", "stderr")]
        pid = os.fork()
        if pid == 0:
            _become_command(self, [str(argument) for argument in arguments], outputs)
        deadline = time.monotonic() + LIMIT_S
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                pytest.fail(f"{arguments} takes more than {LIMIT_S:g} s")
            time.sleep(0.005)
        code = os.waitstatus_to_exitcode(ended[1])
        return subprocess.CompletedProcess(arguments, code, *(o.read_text() for o in outputs))

    briefly = __call__

    def refused(self, code: int, *arguments: object) -> Refusal:
        """Run a command that must end with `code` and one error, without output or traceback."""
        run = self(*arguments)
        assert run.returncode == code, run.stderr
        assert run.stdout == ""
        assert "Traceback" not in run.stderr
        before, *errors = run.stderr.split("error: ")
        assert len(errors) == 1, run.stderr
        message, _, remedy = errors[0].partition("\n  try: ")
        what, _, where = message.partition("\n  where: ")
        return Refusal(what, where, remedy, before)

    def left_over(self) -> list[str]:
        """Return our files in the temporary folder, where torch has a cache, too."""
        return [path.name for path in self.temporary.glob("slipstream-*")]

    def processes(self) -> list[str]:
        """Return commands of the processes started from here that are still running."""
        import psutil

        found = []
        for process in psutil.process_iter():
            try:
                # Forks inherit this environment, but work in another folder.
                ours = process.environ().get("TMPDIR") == self.environment["TMPDIR"]
                ours |= Path(process.cwd()).is_relative_to(self.folder.parent)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found


def _become_command(shell: Shell, arguments: list[str], outputs: list[Path]) -> NoReturn:
    code: object = 70
    try:
        made = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        output, errors = (os.open(path, made) for path in outputs)
        begin_anew(output, errors, shell.environment, shell.folder)
        start_children_as_forks(pytest.MonkeyPatch())
        sys.argv = ["slipstream", *arguments]
        main()
    except SystemExit as left:
        code = left.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        children._end_all()
        os._exit(code if isinstance(code, int) else 1)


def _shell(folder: Path, cache: Path) -> Shell:
    (folder / "tmp").mkdir()
    (folder / "work").mkdir()
    (folder / "work" / "train.py").write_text(TRAIN)
    environment = {
        **os.environ,
        "TMPDIR": str(folder / "tmp"),
        "XDG_CACHE_HOME": str(cache),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "160",
    }
    for name in ("SLIPSTREAM_DEBUG", "SLIPSTREAM_STORE"):
        environment.pop(name, None)
    return Shell(folder / "work", environment)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of micro-benchmarks for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def slipstream(tmp_path: Path, cache: Path) -> Iterator[Shell]:
    """Run the command in a new folder with ``train.py``; check that nothing is left afterwards."""
    shell = _shell(tmp_path, cache)
    yield shell
    # Killed processes end a moment later; others would live for longer than that.
    until = time.monotonic() + _GONE_S
    while shell.processes() and time.monotonic() < until:
        time.sleep(0.02)
    assert shell.processes() == []
    assert shell.left_over() == []


@dataclass(frozen=True)
class Recorded:
    """One ``slipstream profile train.py:make_workload --json``, done once for all tests."""

    shell: Shell
    path: Path
    run: subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Recorded:
    """A recording of a tiny workload, and the outcome of the command that made it."""
    shell = _shell(tmp_path_factory.mktemp("recorded"), cache)
    run = shell(
        "profile", "train.py:make_workload", "--set", "batch_size=4", "--steps", 3, "--json",
        "-o", "tiny.slipgraph",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return Recorded(shell, shell.folder / "tiny.slipgraph", run)


@pytest.fixture
def snapshot() -> Callable[[Path], dict[str, object]]:
    """Return every path of a folder with its content and time."""

    def take(folder: Path) -> dict[str, object]:
        return {
            str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
            if path.is_file()
            else "a folder"
            for path in sorted(folder.rglob("*"))
            if ".slipstream" not in path.parts
        }

    return take
