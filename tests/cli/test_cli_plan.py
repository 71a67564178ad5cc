"""``slipstream plan`` and ``slipstream pretrain``: tables, JSON and single errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.techniques.pretraining import write_shards

_WORKLOAD = """
import torch

class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20)

    def forward(self, ids, mask):
        return self.head(self.table(ids))

def make():
    torch.manual_seed(0)
    model, ids = Words(), torch.randint(5, 20, (2, 6))
    targets = ids.masked_fill(torch.arange(6) > 1, -100)
    loss = lambda out, targets: torch.nn.functional.cross_entropy(out.mT, targets)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, ((ids, torch.ones_like(ids)), targets), loss, optimizer
"""
_TOML = """
workload = "work.py:make"
corpus = "corpus"
output = "run"
mask_token = 3
techniques = "masked_head"
price_per_hour = 1.0
[[phases]]
steps = 3
global_batch = 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(_WORKLOAD)
    write_shards([[5, 6, 7 + n % 9] for n in range(9)], tmp_path / "corpus", 2, 20)
    path = tmp_path / "pretrain.toml"
    path.write_text(_TOML)
    return path


def test_plan_and_training(slipstream: Any, file: Path) -> None:
    run = slipstream("plan", str(file), "--json")
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout)
    chosen = plan["chosen"]
    assert [chosen["micro_batch"] * number for number in chosen["accumulation"]] == [4]
    assert chosen["techniques"] == "masked_head"
    run = slipstream("pretrain", str(file), "--json")
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["losses"]) == 3
    run = slipstream("pretrain", str(file))
    assert run.returncode == 1
    assert "pass --resume to continue it" in run.stderr


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("bugdet = 3", "bugdet"),
        ('deadline = "soon"', "deadline"),
        ("ranks = 0", "ranks: 0 is less than 1"),
        ('cluster = "nowhere"', "nowhere"),
    ],
)
def test_invalid_settings_are_named(slipstream: Any, file: Path, line: str, reason: str) -> None:
    file.write_text(f"{line}\n{_TOML}")
    run = slipstream("plan", str(file))
    assert run.returncode == 2
    assert reason in run.stderr
    assert "Traceback" not in run.stderr


def test_a_plan_beyond_its_limits_fails_with_the_relaxation(slipstream: Any, file: Path) -> None:
    file.write_text(f'deadline = "1 ns"\n{_TOML}')
    run = slipstream("plan", str(file))
    assert run.returncode == 1
    assert "the deadline cannot be met; cheapest relaxation" in run.stdout
