"""A class that a model constructs many times: every call of the model, and no other."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from scripts import BLOCKS, function_losses

from slipstream.source import (
    AlreadyAppliedError,
    EditLocationError,
    Places,
    Source,
    locate,
    undo,
    write,
)
from slipstream.technique import parse
from slipstream.workload import Workload

_LINEAR = "torch.nn.Linear"
_SAME = "torch.nn.modules.linear.NonDynamicallyQuantizableLinear"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    file = tmp_path / "blocks.py"
    file.write_text(BLOCKS)
    return file


def places(path: Path) -> Places:
    return locate(Source.read(path), "make")


def kinds(path: Path) -> list[str]:
    """Return the classes of the model's modules."""
    model = runpy.run_path(str(path))["make"]()[0]
    return [type(module).__qualname__ for module in model.modules()]


def test_every_call_of_the_model_gets_the_class_and_losses_stay(path: Path) -> None:
    before, text = function_losses(path), path.read_text()
    edited = places(path).replace_class(_LINEAR, _SAME)
    write(edited)
    assert kinds(path).count("NonDynamicallyQuantizableLinear") == 8
    assert "Linear" not in kinds(path)
    assert function_losses(path) == before
    # The other model of the file is unchanged.
    assert "nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))" in path.read_text()
    undo(path)
    assert path.read_text() == text


def test_a_dropout_edit_equals_apply(path: Path) -> None:
    (technique,) = parse("dropout")
    applied = function_losses(path, technique)
    change = technique.code(Workload.parse(f"{path}:make"))
    assert change is not None
    assert change.edit is not None
    write(change.edit(places(path)))
    assert function_losses(path) == applied
    text = path.read_text()
    assert "drop=slipstream.nn.Dropout)" in text
    assert "partial(slipstream.nn.Dropout, 0.1)" in text
    assert "self.drop: nn.Dropout = drop(0.1)" in text
    assert "isinstance(self.last, nn.Dropout)" in text
    assert "class Still(nn.Dropout)" in text
    assert "nn.Linear(3, 4), nn.Dropout(0.5)" in text
    with pytest.raises(AlreadyAppliedError, match=r"slipstream\.nn\.Dropout"):
        change.edit(places(path))


def test_modules_that_torch_constructs_cannot_be_edited(path: Path) -> None:
    path.write_text(BLOCKS.replace("self.head = head(8)", "self.head = nn.Transformer(8)"))
    change = parse("dropout")[0].code(Workload.parse(f"{path}:make"))
    assert change is not None
    assert not change.diff
    assert re.search(r"nn\.Transformer\b.*nn\.Dropout\b", change.note)


def test_arguments_of_every_call_of_the_model_are_set(path: Path) -> None:
    before = function_losses(path)
    write(places(path).set_call(_LINEAR, dtype="torch.float32"))
    text = path.read_text()
    assert text.count("dtype=torch.float32") == 4
    assert "nn.Linear(3, 4)," in text
    assert function_losses(path) == before
    with pytest.raises(AlreadyAppliedError):
        places(path).set_call(_LINEAR, dtype="torch.float32")
    # If some calls have them, the others get them.
    path.write_text(text.replace("nn.Linear(width, 4, dtype=torch.float32)", "nn.Linear(width, 4)"))
    assert places(path).set_call(_LINEAR, dtype="torch.float32").text == text


def test_a_class_passed_as_a_value_takes_no_arguments(path: Path) -> None:
    with pytest.raises(EditLocationError, match=r"nn\.Dropout\b"):
        places(path).replace_class("torch.nn.Dropout", "slipstream.nn.Dropout", inplace="True")
    new = places(path).replace_class(_LINEAR, _SAME, bias="True")
    assert new.text.count(f"{_SAME}(") == new.text.count("bias=True") == 4


def test_classes_outside_the_model_are_not_found(path: Path) -> None:
    with pytest.raises(EditLocationError, match=r"nn\.Conv2d\b"):
        places(path).replace_class("torch.nn.Conv2d", "torch.nn.Conv1d")
    path.write_text(BLOCKS.replace("model = Net()", "model = nn.ReLU()"))
    with pytest.raises(EditLocationError, match=r"nn\.Linear\b"):
        places(path).replace_class(_LINEAR, _SAME)
