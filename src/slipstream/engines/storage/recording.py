"""Record the files that a program opens, through an audit hook in its Python processes."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from slipstream.engines.storage.traces import OPS, AccessTrace
from slipstream.errors import InvalidArgumentError, SlipstreamError, UsageError
from slipstream.files import temporary_folder

BLIND_SPOTS = (
    "not recorded: files opened by C or C++ code (h5py, pyarrow, torch.jit.load), by programs that "
    "are not Python, and repeated reads of a file that stays open"
)
_OPS = {"R": "read", "C": "create", "D": "delete"}
_ESCAPES = {r"\\": "\\", r"\n": "\n", r"\t": "\t"}


def record_trace(command: Sequence[str]) -> tuple[AccessTrace, int]:
    """Run a command; return a trace of the files it opened, and its exit status.

    Every opening for reading is a read of the whole file; see `BLIND_SPOTS`. The context has the
    command line of the process. Files that are gone after the run are omitted, but for their
    deletion. Events that could not be recorded, and memory maps, are counted in the notes. An
    interrupted program gives the trace until then.

    Raises:
        UsageError: the command is empty or does not exist.
        SlipstreamError: it opened no file.
    """
    if not command:
        raise InvalidArgumentError("command", "is empty")
    with temporary_folder("storage") as folder:
        log = folder / "opened"
        try:
            running = subprocess.Popen(list(command), env=recording_environment(log))
        except OSError as error:
            raise UsageError(
                f"'{command[0]}' cannot be run: {error.strerror}",
                remedy="slipstream storage record -o run.npz -- python train.py",
            ) from error
        try:
            status = running.wait()
        except KeyboardInterrupt:
            # Ctrl-C also reaches the program: record what it opened until it ends.
            status = running.wait()
        trace = _trace(sorted(folder.glob("opened.*")))
    if not len(trace):
        raise SlipstreamError(
            f"'{' '.join(command)}' opened no data files in a Python process",
            where=f"exit status {status}", remedy=BLIND_SPOTS,
        )  # fmt: skip
    return trace, status


def recording_environment(log: Path) -> dict[str, str]:
    """Return the environment in which Python programs write to files ``log.*`` what they open."""
    hook = str(Path(__file__).parent / "hook")
    path = os.pathsep.join(filter(None, (hook, os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "SLIPSTREAM_STORAGE_RECORD": str(log)}


def _trace(files: Sequence[Path]) -> AccessTrace:
    """Return the trace in the logs of the hook; sizes are those after the run."""
    events: list[tuple[int, int, str, str]] = []
    sizes: dict[str, int] = {}
    notes: Counter[str] = Counter()
    process = ""
    for file in files:
        content = file.read_bytes().rstrip(b"\0").decode("utf-8", "surrogateescape")
        for line in content.split("\n"):
            kind, _, rest = line.partition("\t")
            time, _, path = rest.partition("\t")
            if kind == "P":
                process = _plain(rest)
            elif kind in _OPS and time.isdecimal():
                path = _plain(path)
                if path not in sizes:
                    sizes[path] = _size_of(path)
                # Python also opens folders, pipes and files that do not exist.
                if sizes[path] >= 0 or kind == "D":
                    events.append((int(time), OPS.index(_OPS[kind]), path, process))
            elif line == "M":
                notes["memory maps, whose reads are not recorded"] += 1
            elif line:
                notes["lost events"] += 1
    events.sort(key=lambda event: event[0])
    times, ops, paths, processes = zip(*events, strict=True) if events else ((), (), (), ())
    return AccessTrace.of(
        paths, [max(sizes[path], 0) for path in paths], time_ns=times, ops=ops,
        contexts=[{"process": text} for text in processes],
        notes=notes,
    )  # fmt: skip


def _size_of(path: str) -> int:
    """Return the size of a regular file; -1 if it is none."""
    try:
        status = os.stat(path)
    except OSError:
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


def _plain(text: str) -> str:
    return re.sub(r"\\[\\nt]", lambda match: _ESCAPES[match[0]], text)
