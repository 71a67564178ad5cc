"""A technique of another package: installed, found, predicted, applied, without changing ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli._main import _command
from technique_package import install

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
    """A reader's folder, with the package built from a copy and installed without a network."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "train.py").write_text(TRAIN)
    install(folder)
    return folder


@pytest.fixture
def reader(
    folder: Path,
    forked_children: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """Return a command's output with the package installed, in the folder."""
    monkeypatch.syspath_prepend(folder / "installed")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("SLIPSTREAM_STORE", str(folder / "results.db"))

    def run(*arguments: str) -> str:
        code = _command(list(arguments))
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.out

    return run


def predictions(output: str) -> dict[str, dict[str, Any]]:
    """Return the JSON predictions of a command by technique."""
    found = json.loads(output)
    return {
        prediction["technique"]: prediction
        for prediction in (found if isinstance(found, list) else found["predictions"])
    }


def test_its_own_tests_pass(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(folder / "installed"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder / "package/tests"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_it_is_predicted_and_appears_in_the_advice(reader: Callable[..., str]) -> None:
    reader("profile", "train.py:make", "--steps", "3", "--threads", "1")
    options = ("-t", "gelu:erf", "-t", "gelu:tanh")
    found = predictions(reader("predict", "run.slipgraph", *options, "--json"))
    assert found["gelu:erf"]["provenance"]["microbenchmark"] > 0
    assert found["gelu:tanh"]["reason"] == "its GELU is computed by tanh already"
    advice = predictions(reader("advise", "run.slipgraph", "--no-combinations", "--json"))
    assert advice["gelu:erf"]["speedup"] == found["gelu:erf"]["speedup"]


def test_it_is_applied_with_an_edit_of_the_source(reader: Callable[..., str]) -> None:
    output = reader("apply", "train.py:make", "-t", "gelu:erf", "--threads", "1")
    assert '+        torch.nn.Linear(16, 512), torch.nn.GELU(approximate="none")' in output
