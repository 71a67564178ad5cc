"""``slipstream loops``: predictions, the search and the cost model from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.codegen import why_no_compiler


@pytest.fixture
def nests(tmp_path: Path) -> str:
    path = tmp_path / "nests.py"
    path.write_text(
        "from slipstream import loops\n"
        "def product(): return loops.einsum('ik,kj->ij', i=64, j=64, k=64)\n"
        "def failing(): raise ValueError('no nest')\n"
    )
    return f"{path}:product"


def test_predictions_and_their_errors(slipstream: Any, nests: str) -> None:
    run = slipstream(
        "loops", "predict", nests, "-t", "interchange(j,k)", "-t", "tile(i,8)", "--json"
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)
    assert [row["transform"] for row in rows] == ["interchange(j,k)", "tile(i,8)"]
    assert all(0 < row["low"] < row["speedup"] < row["high"] for row in rows)
    run = slipstream("loops", "predict", nests, "-t", "interchange(j,z)")
    assert run.returncode == 1
    assert "no axis 'z'" in run.stderr
    assert "Traceback" not in run.stderr
    run = slipstream("loops", "predict", f"{nests[:-7]}failing", "-t", "interchange(j,k)")
    assert "raises ValueError: no nest" in run.stderr


@pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))
def test_search_writes_code(slipstream: Any, nests: str, tmp_path: Path) -> None:
    target = tmp_path / "product.cpp"
    run = slipstream("loops", "search", nests, "--beam", "2", "--execute", "1", "-o", str(target))
    assert run.returncode == 0, run.stderr
    assert "schedules were compared" in run.stdout
    assert 'extern "C" void loops_0' in target.read_text()


@pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))
def test_too_few_samples_are_refused(slipstream: Any, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    run = slipstream("loops", "gen", "--programs", "1", "--schedules", "2", "-o", str(path))
    assert run.returncode == 0, run.stderr
    assert "added 1 program" in run.stderr
    run = slipstream("loops", "train", str(path), "-o", str(tmp_path / "model.npz"))
    assert run.returncode == 1
    assert "too few" in run.stderr
