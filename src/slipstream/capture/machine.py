"""The machine a step was recorded on, as far as it explains the step's times."""

from __future__ import annotations

import platform
from typing import Any

from slipstream.measure.facts_machine import UNREADABLE, facts

_FACTS = (
    "cpu.model", "cpu.physical", "cpu.logical", "memory.total_mib",
    "kernel.system", "kernel.release", "machine.container",
)  # fmt: skip


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel and Python, under the names of `Environment.facts`.

    What this machine does not reveal is left out; no name of a host or a user is in it.
    """
    known = facts()
    found = {name: known[name] for name in _FACTS if known[name] not in (None, UNREADABLE)}
    return found | {"python.version": platform.python_version()}
