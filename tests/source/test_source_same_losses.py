"""The edited file computes what the technique's `apply` does, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import FUNCTION, FUNCTIONS, GROUPS, SCRIPTS, STEPS, function_losses, script_losses

from slipstream.source import Source, locate, write
from slipstream.technique import parse
from slipstream.workload import Workload

_TECHNIQUES = ("amp:bf16", "fused_optimizer:fused", "fused_optimizer:foreach", "channels_last")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def edited(path: Path, text: str, techniques: str, function: str = "") -> None:
    """Write `text` with the techniques' edits; each must have one."""
    path.write_text(text)
    target = f"{path}:{function}" if function else str(path)
    source = Source.read(path)
    for technique in parse(techniques):
        change = technique.code(Workload.parse(target))
        assert change is not None
        assert change.diff, change.note
        assert change.edit is not None
        source = change.edit(locate(source, function or None)).settled()
    write(source)


def applied(path: Path, techniques: str, steps: int = STEPS) -> list[float]:
    path.write_text(FUNCTION)
    return function_losses(path, *(parse(techniques) if techniques else ()), steps=steps)


@pytest.mark.parametrize("technique", [*_TECHNIQUES, "amp:bf16+fused_optimizer+channels_last"])
@pytest.mark.parametrize("shape", FUNCTIONS)
def test_a_function(tmp_path: Path, shape: str, technique: str) -> None:
    path = tmp_path / "user.py"
    path.write_text(FUNCTIONS[shape])
    plain = function_losses(path)
    transformed = function_losses(path, *parse(technique))
    edited(path, FUNCTIONS[shape], technique, "make")
    assert function_losses(path) == transformed
    if "amp" in technique:
        assert transformed != plain


@pytest.mark.parametrize("technique", [*_TECHNIQUES, "amp:bf16+fused_optimizer+channels_last"])
@pytest.mark.parametrize("shape", SCRIPTS)
def test_a_script(tmp_path: Path, shape: str, technique: str) -> None:
    path = tmp_path / "user.py"
    path.write_text(SCRIPTS[shape])
    assert script_losses(path) == applied(tmp_path / "function.py", "")
    edited(path, SCRIPTS[shape], technique)
    assert script_losses(path) == applied(tmp_path / "function.py", technique)


@pytest.mark.parametrize("shape", GROUPS)
def test_a_script_with_groups_of_parameters(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "user.py"
    edited(path, GROUPS[shape], "amp:bf16+channels_last")
    assert script_losses(path) == applied(tmp_path / "function.py", "amp:bf16+channels_last")


@pytest.mark.parametrize("shape", SCRIPTS)
@pytest.mark.parametrize("technique", ["accumulation:2", "accumulation:2+amp:bf16"])
def test_accumulation_in_a_script(tmp_path: Path, shape: str, technique: str) -> None:
    path = tmp_path / "user.py"
    edited(path, SCRIPTS[shape], technique)
    found = script_losses(path)
    # Every batch is the same one, so that the two of one update have one loss.
    once = applied(tmp_path / "function.py", technique, steps=STEPS // 2)
    assert found == pytest.approx([loss for loss in once for _ in range(2)], rel=1e-5)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[1] != pytest.approx(found[2], rel=1e-3)
