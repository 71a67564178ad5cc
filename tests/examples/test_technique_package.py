"""A technique from outside: installed, found, predicted, applied, nothing of ours changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "examples" / "technique_package"
TRAIN = """\
import torch

def make():
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 512), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(512, 4)
    )
    batch = torch.randn(64, 16), torch.randn(64, 4)
    return model, batch, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder, with the package built and installed from a copy, without a network."""
    folder = tmp_path_factory.mktemp("outside")
    shutil.copytree(PACKAGE, folder / "package")
    (folder / "train.py").write_text(TRAIN)
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps",
            "--no-build-isolation", "--target", folder / "installed", folder / "package",
        ],
        check=True,
    )  # fmt: skip
    return folder


def run(folder: Path, program: str, *arguments: str) -> str:
    """What a program of this environment prints, with the package beside it."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "installed"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "SLIPSTREAM_STORE": str(folder / "results.db"),
        "OMP_NUM_THREADS": "1",
    }
    command = [str(Path(sys.executable).parent / program), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def predictions(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """By technique, what a command says as JSON."""
    found = json.loads(run(folder, "slipstream", *arguments, "--json"))
    return {
        one["technique"]: one
        for one in (found if isinstance(found, list) else found["predictions"])
    }


def test_its_own_tests_pass(folder: Path) -> None:
    tests = str(folder / "package" / "tests")
    assert " passed" in run(folder, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", tests)


def test_it_is_predicted_and_appears_in_the_advice(folder: Path) -> None:
    run(folder, "slipstream", "profile", "train.py:make", "--steps", "3", "--threads", "1")
    found = predictions(folder, "predict", "run.slipgraph", "-t", "gelu:erf", "-t", "gelu:tanh")
    assert found["gelu:erf"]["provenance"]["microbenchmark"] > 0
    assert found["gelu:tanh"]["why_not"] == "its GELU is computed by tanh already"
    advice = predictions(folder, "advise", "run.slipgraph", "--no-combinations")
    assert advice["gelu:erf"]["ratio"] == found["gelu:erf"]["ratio"]


@pytest.mark.full
def test_it_is_applied_with_an_edit_of_the_source(folder: Path) -> None:
    said = run(folder, "slipstream", "apply", "train.py:make", "-t", "gelu:erf", "--threads", "1")
    assert '+        torch.nn.Linear(16, 512), torch.nn.GELU(approximate="none")' in said
