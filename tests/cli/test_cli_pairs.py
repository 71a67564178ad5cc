"""``hfuse`` on a recorded step: its kernels that could run side by side."""

from __future__ import annotations

import json
from typing import Any


def test_pairs_of_a_step_are_shown(recorded: Any) -> None:
    run = recorded.shell("hfuse", recorded.path.name)
    assert run.returncode == 0, run.stderr
    assert "h100-sxm" in run.stdout + run.stderr
    run = recorded.shell("hfuse", recorded.path.name, "--device", "l4", "--json")
    found = json.loads(run.stdout)
    assert found["device"] == "l4"
    assert found["step_ns"] > 0


def test_errors_are_reported(recorded: Any) -> None:
    refused = recorded.shell.refused
    name = recorded.path.name
    assert "h100-sxm" in refused(2, "hfuse", name, "--device", "abacus").remedy
    assert "slipstream profile" in refused(1, "hfuse", "no.slipgraph").remedy
    assert "-o fused.cu" in refused(2, "hfuse", "a.cu:k1", "b.cu:k2").remedy
    assert "run.slipgraph" in refused(2, "hfuse", "a.cu:k1").remedy
