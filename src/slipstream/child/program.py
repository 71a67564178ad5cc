"""Another program asked one question: run it, wait for a while, read what it answered."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path


def answer_of(
    *command: str,
    timeout_s: float,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes] | None:
    """What `command` did, with nothing on its standard input; None if it gave no answer.

    It gives none where it cannot be started and where it takes longer than `timeout_s` seconds.

    Args:
        directory: where it runs; the working directory of this process by default.
        environment: in place of the variables of this process.
    """
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=directory,
            env=environment,
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
