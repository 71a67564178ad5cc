"""Output of a script under environments that choose among compiled kernels, or none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slipstream.native import loader

_SETTINGS = {
    "scalar": ("SLIPSTREAM_INSTRUCTION_SET", "scalar"),
    "off": ("SLIPSTREAM_NATIVE", "off"),
}


def check_choice(script: str) -> None:
    """`script` prints the level of the best kernel and a result; the choice changes the first only.

    Without the compiled library the level is ``None``.
    """
    found = {}
    for setting, (name, value) in _SETTINGS.items():
        run = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True,
            env={**os.environ, name: value},
        )  # fmt: skip
        found[setting] = run.stdout.split()
    assert found["scalar"][0] == "scalar"
    assert found["off"][0] == "None"
    assert found["scalar"][1:] == found["off"][1:]


def switch_library_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply ``SLIPSTREAM_NATIVE=off`` to a process that has not loaded the library yet."""
    monkeypatch.setattr(loader, "_answer", loader.SWITCHED_OFF)
