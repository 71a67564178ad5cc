"""``slipstream synth``: rules of a model and functions from examples are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TRAIN = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(128, 128)

    def forward(self, x):
        y = torch.nn.functional.dropout(self.layer(x), 0.1)
        return 0.5 * y * (1 + torch.erf(y / 2**0.5))

def make_workload():
    model, x = Model(), torch.randn(512, 128)
    return model, (x, x), torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1)
"""


def test_rules_are_found_and_then_stored(slipstream: Any, tmp_path: Path) -> None:
    path = tmp_path / "clumsy.py"
    path.write_text(_TRAIN)
    search = "synth", "rewrites", f"{path}:make_workload", "--max-ops", "1", "--threads", "1"
    for is_stored in (False, True):
        run = slipstream(*search, "--json")
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout)
        (rule,) = found["rules"]
        assert (rule["replacement"], rule["places"]) == ("F.gelu(a)", 1)
        assert rule["stored"] is is_stored
        assert "aten.bernoulli_.float" in found["reasons"][0]
    run = slipstream(*search, "--budget", "soon")
    assert run.returncode == 2
    assert "--budget" in run.stderr


_DOUBLED = [([3, -1, 4, -1, 5], [6, 8, 10]), ([2, -7, 1], [2, 4]), ([-3, 9], [18])]
"""Sorted, doubled, the positive ones."""


def test_the_command_prints_table_source_and_json(slipstream: Any, tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text("\n".join(json.dumps({"input": i, "output": o}) for i, o in _DOUBLED))
    table, source, payload = (
        slipstream("synth", str(path), *options).stdout
        for options in ((), ("--python",), ("--json",))
    )
    assert "FILTER >0" in table
    assert "no program is shorter" in table
    names: dict[str, Any] = {}
    exec(source, names)
    assert all(names["program"](inputs) == output for inputs, output in _DOUBLED)
    found = json.loads(payload)
    assert (found["python"], found["minimal"]) == (source, True)
    assert slipstream("synth", "nothing.jsonl").returncode == 1
