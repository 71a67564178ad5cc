"""The examples train: as scripts, on their own, and their loss decreases.

And slipstream records each of their functions. The commands in their headers run in tests/docs.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.durations import Durations
from slipstream.mlperf.training import time_to_quality
from slipstream.verbs.predicting import predict
from slipstream.workload import build_from
from tiny_models import record

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Enough for the loss to decrease, at sizes that keep this short.
ARGUMENTS = {
    "hugging_face_style.py": ["--steps", "160"],
    "hugging_face_trainer.py": [],
    "image_classifier.py": ["--steps", "40", "--batch-size", "8"],
    "language_model.py": ["--steps", "20", "--batch-size", "2", "--context", "32"],
    "lightning_module.py": [],
    "lstm.py": ["--steps", "20", "--length", "16"],
    "plain_script.py": ["--epochs", "5", "--batch-size", "128", "--lr", "1e-2"],
    "recommender.py": ["--steps", "40", "--films", "2000"],
}
# Files that an example leaves in the current folder.
WRITES = {"plain_script.py": {"spirals.pt"}, "hugging_face_trainer.py": {"out"}}
FRAMEWORKS = {
    "hugging_face_trainer.py": {"transformers"},
    "lightning_module.py": {"lightning"},
}
# A task for `slipstream mlperf train`.
TASK = "time_to_quality.py"
# Functions for other commands; these examples do not train as scripts.
LIBRARIES = {
    "architecture_search.py",
    "codesign.py",
    "control_stages.py",
    "keyword_spotting.py",
    "learned_function.py",
    "loop_nests.py",
    "tree_lstm.py",
}
# Examples on several ranks, which tests/engines runs.
ON_RANKS = {"summed_gradients.py"}

SMALL = {"batch_size": 2, "width": 8}
FUNCTIONS = (
    ("hugging_face_style.py", "make_workload", {"batch_size": 2}),
    ("image_classifier.py", "make_workload", SMALL),
    ("image_classifier.py", "make_inference", SMALL),
    ("language_model.py", "make_workload", {**SMALL, "layers": 1, "context": 8}),
    ("lstm.py", "make_workload", {**SMALL, "length": 6}),
    ("recommender.py", "make_workload", {**SMALL, "films": 100}),
    ("tree_lstm.py", "make_training", {"batch_size": 2}),
)


class NothingTimed(Durations):
    """Use assumed durations for operators that are not timed."""

    def measure(self, *ignored: Any, **how: Any) -> None:
        """Leave everything unknown."""


NOTHING_TIMED = NothingTimed(threads=1, path=Path(os.devnull, "durations.db"))


def train(name: str, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """Run an example as a script in this process; return the losses it prints."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    return [float(x) for x in re.findall(r"(?:loss|error) ([\d.]+)", capsys.readouterr().out)]


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        *ARGUMENTS,
        *LIBRARIES,
        *ON_RANKS,
        TASK,
    }


def test_the_task_reaches_its_quality(tmp_path: Path) -> None:
    judged = time_to_quality(f"{EXAMPLES / TASK}:digits", runs=1, folder=tmp_path / "logs")
    assert [run.converged for run in judged.arms[0].runs] == [True]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_it_trains_and_the_loss_decreases(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS[name]])
    losses = train(name, capsys)
    assert len(losses) >= 2
    assert losses[-1] < 0.9 * losses[0]
    assert {path.name for path in tmp_path.iterdir()} == WRITES.get(name, set())


@pytest.mark.parametrize(("name", "function", "sizes"), FUNCTIONS)
def test_slipstream_records_and_predicts_it(
    name: str, function: str, sizes: dict[str, int]
) -> None:
    made = runpy.run_path(str(EXAMPLES / name))[function](**sizes)
    graph = record(build_from(made, (), 0, name), steps=2)
    assert graph.samples == sizes["batch_size"]
    assert graph.meta["training"] == (function != "make_inference")
    fused = predict(graph, ["fused_optimizer"], durations=NOTHING_TIMED)[0]
    assert (fused.why_not is None) == (function != "make_inference")


def test_a_searched_network_is_smaller_and_plain() -> None:
    torch.manual_seed(0)
    made = runpy.run_path(str(EXAMPLES / "architecture_search.py"))
    whole = made["network"]()
    made["train"](whole, 2)
    small = made["make_smaller"](whole, {"macs": "<= 0.4x"}, epochs=4, trials=3)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (whole, small)]
    assert sizes[1] < 0.6 * sizes[0]
    assert not any("slipstream" in type(module).__module__ for module in small.modules())
    assert made["is_right"](small, made["TEST"]).float().mean() > 0.6


def test_nests_are_programs() -> None:
    nests = runpy.run_path(str(EXAMPLES / "loop_nests.py"))
    assert len(nests["product"]().statements) == 1
    assert len(nests["blur"]().statements) == 2


def test_one_example_runs_from_a_shell(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "lstm.py"), "--steps", "1", "--length", "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("step    1  squared error")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_it_does_not_mention_slipstream(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text("utf-8"))
    plain = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    imported = {alias.name for node in plain for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    packages = {name.partition(".")[0] for name in imported}
    allowed = {"argparse", "dataclasses", "pydoc_data", "torch"}
    assert packages <= allowed | FRAMEWORKS.get(name, set())
