"""``slipstream apply``: the real transformation beside the original, from the same seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_both_are_run_and_nothing_of_the_users_is_changed(
    slipstream: Any, snapshot: Callable[[Path], dict[str, object]]
) -> None:
    # A script that goes on from its own checkpoint must find none: each run begins anew.
    (slipstream.folder / "script.py").write_text(
        "import os, torch\nfrom train import make_workload\n"
        "model, (inputs, targets), loss, optimizer = make_workload()\n"
        "if os.path.exists('checkpoint.pt'): model.load_state_dict(torch.load('checkpoint.pt'))\n"
        "for _ in range(50):\n"
        "    optimizer.zero_grad(); loss(model(inputs), targets).backward(); optimizer.step()\n"
        "    torch.save(model.state_dict(), 'checkpoint.pt')\n"
    )
    before = snapshot(slipstream.folder)
    run = slipstream("apply", "script.py", "--technique", "amp:bf16", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found["losses_before"]) == len(found["losses_after"]) == 5
    assert found["finite"]
    # bfloat16 has 8 bits: close, and not the same.
    assert found["losses_after"] == pytest.approx(found["losses_before"], rel=0.05)
    assert found["losses_after"] != found["losses_before"]
    assert snapshot(slipstream.folder) == before


@pytest.mark.parametrize(
    ("arguments", "said", "remedy"),
    [
        (("train.py:make_workload",), "no technique is named", "--technique amp:bf16"),
        (("train.py:make_workload", "-t", "amp", "-t", "amp:fp16"), "2 alternatives", "with +"),
        (("train.py:make_workload", "-t", "anp"), "unknown technique 'anp'", "did you mean amp"),
        (("train.py:make_worklaod", "-t", "amp"), "unknown function", "did you mean make_workload"),
        (("run.slipgraph", "-t", "amp"), "recording, which cannot be run", "predict and advise"),
    ],
)
def test_a_malformed_request_is_a_usage_error_with_a_remedy(
    slipstream: Any, arguments: tuple[str, ...], said: str, remedy: str
) -> None:
    run = slipstream.briefly("apply", *arguments)
    assert run.returncode == 2
    assert said in run.stderr
    assert remedy in run.stderr
    assert run.stdout == ""
