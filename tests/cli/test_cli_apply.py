"""``slipstream apply``: the transformed step next to the original, from the same seed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_both_are_run_and_no_user_file_is_changed(
    slipstream: Any, snapshot: Callable[[Path], dict[str, object]]
) -> None:
    # A script that resumes from its checkpoint must find none: each run starts from scratch.
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
    # bfloat16 has 8 bits: close, but not equal.
    assert found["losses_after"] == pytest.approx(found["losses_before"], rel=0.05)
    assert found["losses_after"] != found["losses_before"]
    assert snapshot(slipstream.folder) == before


def test_write_edits_the_file_and_undo_restores_it(slipstream: Any) -> None:
    train = slipstream.folder / "train.py"
    before = train.read_bytes()
    run = slipstream("apply", "train.py:make_workload", "-t", "fused_optimizer+amp", "--write")
    assert run.returncode == 0, run.stderr
    # Plain text in a pipe, without broken lines.
    added = "+    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)"
    assert added in run.stdout.splitlines()
    assert re.search(r"\btrain\.py\b.*\bedited\b.*\btrain\.py\.orig\b", run.stderr)
    assert "slipstream apply train.py --undo" in run.stderr
    assert b"fused=True" in train.read_bytes()
    assert b"torch.autocast" in train.read_bytes()
    assert (slipstream.folder / "train.py.orig").read_bytes() == before
    # The edited file is a workload that includes the techniques.
    again = slipstream("apply", "train.py:make_workload", "-t", "amp+fused_optimizer", "--json")
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert found["diff"] == ""
    assert all(note.startswith("already so") for note in found["code_notes"])
    assert "fused=True" in found["not_run"]
    shown = [f"{loss:.5f}" for loss in found["losses_before"]]
    assert all(text in run.stdout for text in shown)
    run = slipstream.briefly("apply", "train.py", "--undo")
    assert run.returncode == 0, run.stderr
    assert train.read_bytes() == before
    assert re.search(r"\bsaved\b.*\btrain\.py\.undone\b", run.stderr)


def test_a_class_is_edited_wherever_the_model_constructs_it(slipstream: Any) -> None:
    train = slipstream.folder / "blocks.py"
    train.write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.parts = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Dropout(0.2))\n\n"
        "    def forward(self, x):\n"
        "        return x + self.parts(x)\n\n"
        "def make():\n"
        "    blocks = [Block() for _ in range(3)]\n"
        "    blocks.append(nn.Dropout(0.3))\n"
        "    model = nn.Sequential(*blocks)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    batch = torch.ones(4, 8), torch.ones(4, 8)\n"
        "    return model, batch, nn.functional.mse_loss, optimizer\n"
    )
    before = train.read_bytes()
    run = slipstream("apply", "blocks.py:make", "-t", "dropout", "--write", "--json")
    assert run.returncode == 0, run.stderr
    applied = json.loads(run.stdout)
    text = train.read_text()
    assert text.count("slipstream.nn.Dropout(") == 3
    assert " nn.Dropout" not in text
    again = slipstream("apply", "blocks.py:make", "-t", "fused_optimizer", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["losses_before"] == applied["losses_after"]
    assert slipstream.briefly("apply", "blocks.py", "--undo").returncode == 0
    assert train.read_bytes() == before


def test_a_closed_pipe_does_not_stop_the_writing(slipstream: Any) -> None:
    train = slipstream.folder / "train.py"
    before = train.read_bytes()
    reading, writing = os.pipe()
    os.close(reading)
    process = slipstream.start(
        "apply", "train.py:make_workload", "-t", "fused_optimizer", "--write", stdout=writing
    )
    os.close(writing)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0
    assert re.search(r"\btrain\.py\b.*\bedited\b", stderr)
    assert b"fused=True" in train.read_bytes()
    assert (slipstream.folder / "train.py.orig").read_bytes() == before


def test_undo_reports_a_missing_backup(slipstream: Any) -> None:
    error = slipstream.refused(1, "apply", "train.py:make_workload", "--undo")
    assert "'train.py.orig'" in error.what


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        (("train.py:make_workload",), "technique", "--technique amp:bf16"),
        (("train.py:make_workload", "-t", "amp", "-t", "amp:fp16"), "2 ", " +"),
        (("train.py:make_workload", "-t", "anp"), "'anp'", " amp "),
        (("train.py:make_worklaod", "-t", "amp"), "'make_worklaod'", " make_workload?"),
        (("train.py", "-t", "amp", "--undo"), "--undo", "train.py --undo"),
        (("run.slipgraph", "-t", "amp"), "run.slipgraph", "advise"),
    ],
)
def test_a_malformed_request_is_a_usage_error_with_a_remedy(
    slipstream: Any, arguments: tuple[str, ...], message: str, remedy: str
) -> None:
    error = slipstream.refused(2, "apply", *arguments)
    assert message in error.what
    assert remedy in error.remedy


def test_the_reason_for_no_edit_is_reported_once(slipstream: Any) -> None:
    (slipstream.folder / "two.py").write_text(
        "import torch\n"
        "first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)\n"
        "one = torch.optim.Adam(first.parameters())\n"
        "two = torch.optim.Adam(second.parameters())\n"
        "for _ in range(50):\n"
        "    second(first(torch.ones(2, 4))).sum().backward()\n"
        "    one.step()\n"
        "    two.step()\n"
    )
    run = slipstream("apply", "two.py", "-t", "accumulation:4", "--write")
    assert run.returncode == 1
    why = r"\b2 optimizers\b"
    assert re.search(why, run.stdout)
    assert not re.search(why, run.stderr)
    assert not (slipstream.folder / "two.py.orig").exists()
    machine = slipstream("apply", "two.py", "-t", "accumulation:4", "--write", "--json")
    assert re.search(why, machine.stderr)


def test_a_technique_that_the_step_already_uses_is_not_applied(slipstream: Any) -> None:
    (slipstream.folder / "making.py").write_text(
        "import torch\nfrom train import make_workload\n"
        "def make():\n"
        "    model, batch, loss, optimizer = make_workload()\n"
        "    return model, batch, loss, type(optimizer)(model.parameters(), lr=0.1, fused=True)\n"
    )
    script = slipstream.folder / "script.py"
    script.write_text(
        "from making import make\nmodel, (inputs, targets), loss, optimizer = make()\n"
        "for _ in range(50):\n"
        "    optimizer.zero_grad(); loss(model(inputs), targets).backward(); optimizer.step()\n"
    )
    before = script.read_bytes()
    for target in ("making.py:make", "script.py"):
        run = slipstream("apply", target, "-t", "fused_optimizer", "--write", "--json")
        assert run.returncode == 0, run.stderr
        found = json.loads(run.stdout)
        assert found["not_run"] == "the optimizer is fused already"
        assert found["losses_after"] == [None] * 5
        assert (found["diff"], found["written"]) == ("", None)
    assert script.read_bytes() == before
    run = slipstream("apply", "script.py", "-t", "fused_optimizer+threads:1", "--json")
    assert json.loads(run.stdout)["not_run"] is None


def test_the_edited_loop_of_a_script_runs_before_it_is_written(slipstream: Any) -> None:
    (slipstream.folder / "script.py").write_text(
        "from train import make_workload\n"
        "import torch\n"
        "model, (inputs, targets), loss_of, _ = make_workload()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(50):\n"
        "    optimizer.zero_grad()\n"
        "    loss = loss_of(model(inputs), targets)\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    run = slipstream("apply", "script.py", "-t", "accumulation:4", "--write")
    assert run.returncode == 0, run.stderr
    output = " ".join(run.stdout.split())
    assert re.search(r"\bruns\b.*\b5 steps\b.*\bdiffer\b", output)
    assert "(loss / 4).backward()" in (slipstream.folder / "script.py").read_text()
