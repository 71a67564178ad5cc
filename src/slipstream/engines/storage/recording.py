"""Record the files that a program opens, through an audit hook in its Python processes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from slipstream.engines.storage.traces import OPS, AccessTrace
from slipstream.errors import SlipstreamError, UsageError
from slipstream.files import temporary_folder

BLIND_SPOTS = (
    "not recorded: files opened by C or C++ code (h5py, pyarrow, torch.jit.load), by programs that "
    "are not Python, and repeated reads of a file that stays open"
)
_ESCAPES = {r"\\": "\\", r"\n": "\n", r"\t": "\t"}


def record_trace(command: Sequence[str]) -> tuple[AccessTrace, int]:
    """Run a command; return a trace of the files it opened, and its exit status.

    Every opening for reading is a read of the whole file; see `BLIND_SPOTS`. The context has the
    command line of the process. Events that could not be recorded are counted in the notes.

    Raises:
        UsageError: the command does not exist.
        SlipstreamError: it opened no file.
    """
    hook = str(Path(__file__).parent / "hook")
    with temporary_folder("storage") as folder:
        log = folder / "opened"
        path = os.pathsep.join(filter(None, (hook, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": path, "SLIPSTREAM_STORAGE_RECORD": str(log)}
        try:
            status = subprocess.run(list(command), env=environment, check=False).returncode
        except OSError as error:
            raise UsageError(
                f"'{command[0]}' cannot be run: {error.strerror}",
                remedy="slipstream storage record -o run.npz -- python train.py",
            ) from error
        lines = log.read_bytes().decode("utf-8", "surrogateescape").split("\n") if (
            log.exists()
        ) else []  # fmt: skip
    trace = _trace(lines)
    if not len(trace):
        raise SlipstreamError(
            f"'{' '.join(command)}' opened no data files in a Python process",
            where=f"exit status {status}", remedy=BLIND_SPOTS,
        )  # fmt: skip
    return trace, status


def _trace(lines: Sequence[str]) -> AccessTrace:
    processes: dict[str, str] = {}
    events: list[tuple[int, str, int, str, str]] = []
    lost = 0
    for line in lines:
        kind, *fields = line.split("\t")
        if kind == "P" and len(fields) == 2:
            processes[fields[0]] = _plain(fields[1])
        elif kind in OPS and len(fields) == 4:
            pid, time, size, path = fields
            events.append((int(time), kind, int(size), _plain(path), pid))
        elif line:
            lost += 1
    events.sort(key=lambda event: event[0])
    return AccessTrace.of(
        [path for _, _, _, path, _ in events], [size for _, _, size, _, _ in events],
        time_ns=[time for time, *_ in events], ops=[OPS.index(op) for _, op, *_ in events],
        contexts=[{"process": processes.get(pid, "")} for *_, pid in events],
        notes={"lost events": lost} if lost else {},
    )  # fmt: skip


def _plain(text: str) -> str:
    return re.sub(r"\\[\\nt]", lambda match: _ESCAPES[match[0]], text)
