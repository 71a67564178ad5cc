"""Run another program and read its output."""

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
    """Run `command` without input; return None if it cannot be started or exceeds `timeout_s`.

    Args:
        directory: working directory; this process's by default.
        environment: variables that replace those of this process.
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
