"""The peer of ``slipstream bench graph``: traceinsight, in an environment created when needed.

It is not a dependency of ours and never imported here: a process of that environment returns its
CPU time for the same file (see `peer_process`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from collections.abc import Callable
from pathlib import Path

from slipstream.durations.durations import cache_folder
from slipstream.errors import ChildError
from slipstream.measure.arms import Arm, Sample

_NAME, _RELEASE = "traceinsight", "0.6.1"
VERSION = f"{_NAME} {_RELEASE}"
_PROCESS = Path(__file__).with_name("peer_process.py")
_INSTALL_S = 600


def _python() -> Path:
    folder = cache_folder() / "peers" / f"{_NAME}-{_RELEASE}"
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def why_no_peer(progress: Callable[[str], None]) -> str | None:
    """Install the peer if needed; return None if it runs, otherwise why not."""
    python = _python()
    if _answers(python):
        return None
    folder = python.parent.parent
    progress(f"installing {VERSION} into a separate environment")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--progress-bar", "off"]
        subprocess.run(
            [*command, f"{_NAME}=={_RELEASE}"], check=True, capture_output=True, timeout=_INSTALL_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        return f"{VERSION} cannot be installed: {type(error).__name__}"
    return None if _answers(python) else f"{VERSION} does not start"


def _answers(python: Path) -> bool:
    try:
        done = subprocess.run([python, "-c", "import hta"], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


class Peer:
    """A process of the peer that has loaded one trace file.

    Args:
        file: path of the trace.
        instance: index of the step of the critical path.
    """

    def __init__(self, file: Path, instance: int) -> None:
        self._process = subprocess.Popen(
            [_python(), str(_PROCESS), str(file), str(instance)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def cpu_s(self, what: str) -> float:
        """Return CPU seconds of another ``parse``, start of a ``whole`` analysis, or ``path``.

        Raises:
            ChildError: the process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{what}\n")
            self._process.stdin.flush()
            return float(json.loads(self._process.stdout.readline()))
        except (OSError, ValueError) as error:
            raise ChildError(f"{VERSION} ended before it answered") from error

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


class PeerArm(Arm):
    """A task of the peer's process, timed by its CPU clock."""

    def __init__(self, name: str, peer: Peer, what: str) -> None:
        super().__init__(name, f"{VERSION}: {what}")
        self._peer, self._what = peer, what

    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        """Run one task; its wall time is reported as its CPU time."""
        spent_ns = 1e9 * self._peer.cpu_s(self._what)
        return {"wall": spent_ns, "cpu": spent_ns}
