"""The workflow and the engine, for every pair of torch and Python, however installed.

It needs the package, pytest and hypothesis, and nothing else of this folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slipstream as ss
from slipstream import native
from slipstream.graph import read_chakra, replay
from slipstream.technique import registry

pytestmark = [pytest.mark.smoke]
# Whether the compiled engine must be present ("1"), must be absent (""), or either (None).
_NATIVE = os.environ.get("SLIPSTREAM_SMOKE_NATIVE")
if _NATIVE == "":
    # A missing engine is reported once, at its first use.
    missing = "ignore:the compiled engine is not available:slipstream.errors.SlipstreamWarning"
    pytestmark.append(pytest.mark.filterwarnings(missing))

TRAIN = """
import torch

def make_workload(width=64):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 4),
    )
    batch = torch.randn(16, 3, 8, 8), torch.randint(4, (16,))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return model, batch, torch.nn.functional.cross_entropy, optimizer
"""


def run(folder: Path, *arguments: str) -> Any:
    """Return the output of ``slipstream ARGUMENTS --json``."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "slipstream", *arguments]
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout) if "--json" in arguments else ran.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke")
    (folder / "train.py").write_text(TRAIN)
    run(folder, "profile", "train.py:make_workload", "-o", "run.slipgraph", "--threads", "1")
    return folder


def test_the_command_shows_its_help() -> None:
    assert "profile" in run(Path.cwd(), "--help")


def test_every_technique_is_registered() -> None:
    assert {"amp", "ddp", "lowbit", "channels_last"} <= set(registry())


def test_the_recorded_step_is_as_long_as_its_path(folder: Path) -> None:
    graph = ss.load(folder / "run.slipgraph")
    names = {task.name for task in (graph.task(n) for n in range(len(graph)))}
    assert any("convolution" in name for name in names)
    assert replay(graph).step_ns > 0
    assert run(folder, "explain", "run.slipgraph", "--json")["step_ns"] > 0


def test_techniques_are_predicted(folder: Path) -> None:
    options = ["--technique", "fused_optimizer", "--technique", "channels_last"]
    found = run(folder, "predict", "run.slipgraph", *options, "--json")
    names = sorted(row["technique"].partition(":")[0] for row in found)
    assert names == ["channels_last", "fused_optimizer"]


def test_a_technique_is_proved(folder: Path) -> None:
    found = run(
        folder, "prove", "train.py:make_workload", "--technique", "fused_optimizer",
        "--budget", "5s", "--threads", "1", "--json",
    )  # fmt: skip
    assert any("fused_optimizer" in claim["arm"] for claim in found["claims"])


def test_an_export_is_imported_equal(folder: Path) -> None:
    graph = ss.load(folder / "run.slipgraph")
    assert read_chakra(ss.export(graph, folder / "run.et")) == graph
    assert json.loads(ss.export(graph, folder / "run.json").read_text())["traceEvents"]


def test_the_engine_equals_its_reference_bitwise(folder: Path) -> None:
    program = native.Program(
        lane=np.array([0, 1, 0, 1], np.int32),
        duration_ns=np.array([10.0, 20.0, 5.0, 1.0]),
        gap_ns=np.zeros(4),
        policies=np.zeros(2, np.uint8),
        edges=native.Edges(
            np.array([0], np.int32), np.array([1], np.int32), np.zeros(1), np.zeros(1, np.uint8)
        ),
        steps=2,
    )
    found = native.simulate(program)
    assert found.start_ns[0].tolist() == [0, 10, 10, 30]
    if _NATIVE is not None:
        assert (native.library() is not None) == bool(_NATIVE)


def test_two_functions_are_compared() -> None:
    found = ss.measure.compare(
        {"much": lambda: sum(range(20_000)), "little": lambda: sum(range(2_000))}, budget="3s"
    )
    assert found.ratio("little").ratio < 1
