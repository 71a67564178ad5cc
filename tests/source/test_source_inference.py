"""Edits for inference are compatible, in any order of requesting and writing."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.source import Source, locate, write
from slipstream.technique import parse
from slipstream.workload import Workload, build_from

_TEXT = """\
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    model[1].running_mean.uniform_()
    model.eval()
    images = torch.randn(2, 3, 8, 8)
    return model, images
"""
_TECHNIQUES = ("inference_mode", "conv_bn_fold", "channels_last")


def _edit(path: Path, techniques: str) -> None:
    """Apply ``apply --write`` to the file."""
    source = Source.read(path)
    for technique in parse(techniques):
        change = technique.code(Workload.parse(f"{path}:make"))
        assert change is not None
        assert change.edit is not None
        source = change.edit(locate(source, "make")).reparse()
    write(source)


def _run(path: Path) -> tuple[Any, torch.Tensor]:
    built = build_from(runpy.run_path(str(path))["make"](), (), 0, "")
    # Call the model directly, with only the context that the file itself provides.
    return built.model, built.model(built.batch)


@pytest.mark.parametrize("separately", [False, True], ids=["one write", "a write each"])
@pytest.mark.parametrize(
    "techniques",
    [*itertools.permutations(_TECHNIQUES, 2), *itertools.permutations(_TECHNIQUES)],
    ids="+".join,
)
def test_every_edit_is_in_effect_when_the_file_runs(
    tmp_path: Path, techniques: tuple[str, ...], separately: bool
) -> None:
    path = tmp_path / "infer.py"
    path.write_text(_TEXT)
    expected = _run(path)[1]
    for technique in techniques if separately else ["+".join(techniques)]:
        _edit(path, technique)
    model, output = _run(path)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    weight = next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d)).weight
    assert output.is_inference() == ("inference_mode" in techniques), path.read_text()
    assert (not norms) == ("conv_bn_fold" in techniques), path.read_text()
    in_format = weight.is_contiguous(memory_format=torch.channels_last)
    assert in_format == ("channels_last" in techniques), path.read_text()
    torch.testing.assert_close(output.clone(), expected.detach(), rtol=1e-4, atol=1e-5)


def test_a_forward_replaced_in_a_block_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "infer.py"
    wrap = "    if True:\n        model.forward = torch.inference_mode()(model.forward)\n"
    path.write_text(_TEXT.replace("    model.eval()\n", wrap))
    change = parse("conv_bn_fold")[0].code(Workload.parse(f"{path}:make"))
    assert change is not None
    assert change.diff == ""
    assert "'model.forward'" in change.note
