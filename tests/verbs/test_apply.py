"""apply offers the equivalent edit of the user's source, complete or not at all."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from slipstream.errors import WorkloadError
from slipstream.measure.checks import Trial
from slipstream.technique import CodeChange, Quality, QualityKind, TechniqueSettings, parse
from slipstream.verbs import applying
from slipstream.verbs.applying import apply
from slipstream.workload import Workload

_TEXT = """\
import torch

def make():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, (torch.randn(4, 3), torch.randn(4, 2)), torch.nn.functional.mse_loss, optimizer
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A workload whose trial in a child is replaced by a fixed result."""
    monkeypatch.setattr(
        applying,
        "_first_steps",
        lambda _, __, chosen, **___: ((1.0,), Trial(0, 1), [None] * len(chosen)),
    )
    (tmp_path / "train.py").write_text(_TEXT)
    return f"{tmp_path / 'train.py'}:make"


def test_a_combination_is_one_edit(target: str) -> None:
    applied = apply(target, "fused_optimizer+amp")
    assert applied.source is not None
    assert applied.diff == applied.source.diff()
    assert "fused=True" in applied.diff
    assert "model.forward = torch.autocast" in applied.diff
    assert [change.diff.count("\n+") - 1 for change in applied.code] == [1, 3]


@pytest.mark.parametrize("technique", ["amp+accumulation:2", "amp:fp16+fused_optimizer"])
def test_an_incomplete_edit_is_shown_but_not_offered_as_a_file(target: str, technique: str) -> None:
    applied = apply(target, technique)
    assert applied.source is None
    # The parts that exist are shown, with a note on the others.
    assert applied.diff
    notes = [change.note for change in applied.code if not change.diff]
    assert len(notes) == 1
    assert re.search(r":\n    \S", notes[0]), "what to write by hand"


def test_an_edit_already_in_the_file_is_named_and_counts(target: str) -> None:
    path = Path(target.removesuffix(":make"))
    path.write_text(_TEXT.replace("lr=0.1", "lr=0.1, fused=True"))
    applied = apply(target, "fused_optimizer")
    assert applied.source is not None
    assert not applied.source.changed
    assert "fused=True" in applied.code[0].note
    assert apply(target, "fused_optimizer+amp").source is not None


def test_a_diff_without_an_edit_is_shown_and_not_written(target: str) -> None:
    technique = parse("fused_optimizer")[0]

    class Foreign:
        def __getattr__(self, name: str) -> Any:
            return getattr(technique, name)

        def code(self, workload: Workload) -> CodeChange:
            return CodeChange("--- a\n+++ b\n")

    applied = apply(target, Foreign())  # type: ignore[arg-type]
    assert applied.source is None
    assert applied.diff == "--- a\n+++ b\n"


def test_live_objects_have_no_source() -> None:
    import torch

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 3), torch.randn(4, 2)
    live = Workload.of(model, batch, torch.nn.functional.mse_loss, optimizer)
    applied = apply(live, "fused_optimizer")
    assert applied.code == ()
    assert applied.source is None
    assert applied.diff == ""
    assert applied.after == pytest.approx(applied.before, rel=1e-5)


def _command(*arguments: str) -> None:
    """Run ``slipstream apply`` in this process."""
    import typer

    from slipstream.cli import apply as command

    app = typer.Typer()
    app.command()(command.command)
    app(list(arguments), standalone_mode=False)


def test_write_edits_the_file_and_undo_restores_it(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(target.removesuffix(":make"))
    _command(target, "-t", "fused_optimizer", "--json", "--write")
    found = json.loads(capsys.readouterr().out)
    assert found["written"] == str(path)
    assert found["backup"] == f"{path}.orig"
    assert "+    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)" in (
        found["diff"].splitlines()
    )
    assert path.read_text() == _TEXT.replace("lr=0.1", "lr=0.1, fused=True")
    _command(target, "-t", "fused_optimizer", "--write")
    shown = capsys.readouterr()
    assert "fused=True" in shown.out
    assert "+ " not in shown.out, "nothing is changed"
    assert path.read_text() == _TEXT.replace("lr=0.1", "lr=0.1, fused=True")
    _command(str(path), "--undo", "--json")
    assert json.loads(capsys.readouterr().out)["restored"] == str(path)
    assert path.read_text() == _TEXT


def test_undo_reports_the_remaining_edits(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(target.removesuffix(":make"))
    for technique in ("fused_optimizer", "amp"):
        _command(target, "-t", technique, "--write")
    capsys.readouterr()
    _command(str(path), "--undo")
    assert re.search(r"\b1\b.*--undo\b", capsys.readouterr().err)
    _command(str(path), "--undo")
    stderr = capsys.readouterr().err
    assert str(path) in stderr
    assert "--undo" not in stderr, "nothing remains to undo"
    assert path.read_text() == _TEXT
    assert sorted(os.listdir(path.parent)) == ["train.py", "train.py.undone"]


def test_an_inference_is_shown_without_an_empty_table(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = iter([[1.0, -4.0], [1.0, -4.1]])

    def steps(*_: Any, **__: Any) -> Any:
        trial = Trial(0, 5, output=np.array(next(outputs)), shape=(2,), training=False)
        return (None,) * 5, trial, [None]

    monkeypatch.setattr(applying, "_first_steps", steps)
    _command(target, "-t", "fused_optimizer")
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"\boutput\b.*\b2\.5 %", lines[2])
    assert not any("baseline loss" in line for line in lines), "no row of losses"


def test_refuses_to_write_an_incomplete_edit(target: str) -> None:
    path = Path(target.removesuffix(":make"))
    with pytest.raises(WorkloadError, match="nothing was written") as caught:
        _command(target, "-t", "fused_optimizer+accumulation:2", "--write", "--json")
    assert re.search(r"\bmake\(\).*\bloop\b", str(caught.value.remedy))
    assert "(loss / 2).backward()" in str(caught.value.remedy)
    assert path.read_text() == _TEXT
    assert os.listdir(path.parent) == ["train.py"]


def test_refuses_to_write_if_a_loss_is_not_finite(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan = (float("nan"),), Trial(0, 1), [None]
    monkeypatch.setattr(applying, "_first_steps", lambda *_, **__: nan)
    path = Path(target.removesuffix(":make"))
    with pytest.raises(WorkloadError, match="not finite"):
        _command(target, "-t", "fused_optimizer", "--write")
    assert path.read_text() == _TEXT
    assert os.listdir(path.parent) == ["train.py"]


@pytest.mark.parametrize(("terminal", "coloured"), [(True, True), (False, False)])
def test_the_diff_is_coloured_on_a_terminal_only(
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    coloured: bool,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    else:
        monkeypatch.delenv("FORCE_COLOR", raising=False)
    _command(target, "-t", "fused_optimizer")
    shown = capsys.readouterr().out
    added = "+    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)"
    # Never folded: patch needs whole lines.
    assert (f"\x1b[32m{added}\x1b[0m" if coloured else f"\n{added}\n") in shown
    assert ("\x1b[" in shown) == coloured


class _Scaled:
    """A model whose output is an object, as many libraries return."""

    def __new__(cls) -> Any:
        import torch

        class Module(torch.nn.Linear):
            def forward(self, x: Any) -> Any:
                from types import SimpleNamespace

                return SimpleNamespace(loss=None, logits=super().forward(x))

        return Module(3, 2)


@dataclass(frozen=True)
class _Larger(TechniqueSettings):
    """A technique that changes every output by a tenth."""

    factor: float = 1.1

    name: ClassVar[str] = "larger"

    def apply(self, built: Any) -> None:
        import torch

        with torch.no_grad():
            for parameter in built.model.parameters():
                parameter.mul_(self.factor)

    def quality(self, graph: Any = None) -> Quality:
        return Quality(QualityKind.ROUNDING, "")

    def code(self, workload: Workload) -> None:
        return None


def test_outputs_of_an_inference_are_compared() -> None:
    import torch

    live = Workload.of(_Scaled(), torch.randn(4, 3))
    applied = apply(live, _Larger())  # type: ignore[arg-type]
    assert applied.before == (None,) * 5
    assert applied.outputs is not None
    assert applied.outputs.difference == pytest.approx(0.1, rel=1e-3)
    assert applied.finite
    same = apply(live, "inference_mode")
    assert same.outputs is not None
    assert same.outputs.difference == 0


def test_reports_an_output_that_is_not_finite() -> None:
    import torch

    broken = _Larger(float("nan"))
    applied = apply(Workload.of(_Scaled(), torch.randn(4, 3)), broken)  # type: ignore[arg-type]
    assert not applied.finite
