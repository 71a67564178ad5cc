"""Facts about the machine in a recording."""

from __future__ import annotations

import json
import socket

from slipstream.capture.describe import describe_long_steps, describe_machine
from slipstream.measure.environment import capture
from tiny_models import captured


def test_the_graph_has_facts_of_the_environment_and_no_names() -> None:
    machine = captured("mlp").meta["machine"]
    assert machine == describe_machine()
    here = capture(torch=False).facts
    assert {name: here[name] for name in machine} == machine
    assert {"cpu.logical", "memory.total_mib", "python.version"} <= set(machine)
    assert socket.gethostname() not in json.dumps(machine)


def test_long_steps_are_described_if_they_take_a_tenth_of_the_time() -> None:
    assert describe_long_steps([1.0] * 20 + [5.0] * 4) == {
        "long_steps": {"number": 4, "of": 24, "share": 0.5}
    }
    assert describe_long_steps([1.0] * 40 + [3.0]) == describe_long_steps([1.0, 1.9]) == {}
