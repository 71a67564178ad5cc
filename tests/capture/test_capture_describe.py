"""Facts about the machine in a recording."""

from __future__ import annotations

import json
import socket

from slipstream.capture.describe import describe_machine
from slipstream.measure.environment import capture
from tiny_models import captured


def test_the_graph_has_facts_of_the_environment_and_no_names() -> None:
    machine = captured("mlp").meta["machine"]
    assert machine == describe_machine()
    here = capture(torch=False).facts
    assert {name: here[name] for name in machine} == machine
    assert {"cpu.logical", "memory.total_mib", "python.version"} <= set(machine)
    assert socket.gethostname() not in json.dumps(machine)
