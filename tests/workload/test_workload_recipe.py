"""A `Workload` is a value, and parsing it reads the user's file without running it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream import technique
from slipstream.errors import InvalidArgumentError, UnknownNameError, WorkloadError
from slipstream.verbs.children import workload_of
from slipstream.workload import Workload
from slipstream.workload.recipe import workload_functions


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("train.py")
    path.write_text("raise SystemExit('this file was run')\ndef make_workload(n=1): ...\n")
    return path


@pytest.mark.usefixtures("train")
def test_a_function_is_given_by_file_and_name() -> None:
    workload = Workload.parse("train.py:make_workload", n=3)
    assert (workload.path, workload.function) == (Path("train.py"), "make_workload")
    assert workload.name == "train.py:make_workload(n=3)"


def test_live_objects_may_set_their_number_of_samples() -> None:
    model, batch = torch.nn.Linear(2, 2), torch.randn(6, 2)
    assert Workload.of(model, batch).build().samples == 6
    assert Workload.of(model, batch, samples=3).build().samples == 3
    with pytest.raises(InvalidArgumentError, match="samples"):
        Workload.of(model, batch, samples=-1)


@pytest.mark.usefixtures("train")
def test_a_plain_script_has_its_own_arguments() -> None:
    workload = Workload.parse("train.py", "--epochs", "1")
    assert workload.function is None
    assert workload.script_arguments == ("--epochs", "1")


@pytest.mark.usefixtures("train")
def test_a_line_of_a_plain_script_is_not_a_function() -> None:
    workload = Workload.parse("train.py:1", "--epochs", "1")
    assert (workload.function, workload.line, workload.name) == (None, 1, "train.py:1")
    assert Workload(workload.to_json()["target"]).line == 1
    for line in ("40", "9" * 5000):
        with pytest.raises(WorkloadError, match="no statement on this line"):
            Workload.parse(f"train.py:{line}")


@pytest.mark.usefixtures("train")
def test_keyword_arguments_of_a_plain_script_are_refused_with_two_remedies() -> None:
    with pytest.raises(InvalidArgumentError, match="plain script") as caught:
        Workload.parse("train.py", n=3)
    assert "--" in str(caught.value.remedy)
    assert "train.py:FUNCTION" in str(caught.value.remedy)


@pytest.mark.usefixtures("train")
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("train", "train.py"),
        ("train:make_workload", "train.py:make_workload"),
        ("train.make_workload", "train.py:make_workload"),
    ],
)
def test_near_misses_get_a_suggestion(written: str, meant: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Workload.parse(written)
    assert caught.value.remedy == f"did you mean {meant}?"


@pytest.mark.usefixtures("train")
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("run.slipgrph", "run.slipgraph"),
        ("trian.pyy:make", "train.py:make"),
        ("nowhere/xyz.gph", None),
    ],
)
def test_a_misspelt_file_suggests_the_nearest(written: str, meant: str | None) -> None:
    Path("run.slipgraph").touch()
    with pytest.raises(InvalidArgumentError) as caught:
        Workload.parse(written)
    example = "for example train.py:make_workload, or train.py"
    expected = f"did you mean {meant}?" if meant else example
    assert caught.value.remedy == expected


@pytest.mark.usefixtures("train")
def test_a_missing_file_suggests_the_nearest() -> None:
    with pytest.raises(WorkloadError, match=r"\bno file 'trian\.py'") as caught:
        Workload.parse("trian.py")
    assert caught.value.remedy == "did you mean train.py?"


def test_a_notebook_becomes_a_script() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Workload.parse("my notes.ipynb")
    assert "nbconvert --to script 'my notes.ipynb'" in str(caught.value.remedy)


def test_a_missing_folder_is_reported() -> None:
    with pytest.raises(WorkloadError) as caught:
        Workload.parse("no/such/folder/train.py")
    assert "'no/such/folder' does not exist" in str(caught.value.remedy)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(WorkloadError, match="cannot be read"):
        Workload.parse(str(tmp_path / "folder.py"))


@pytest.mark.parametrize("text", ["x = 1\ndef f(:\n", "x = 1\nif True:\nprint(x)\n"])
def test_a_syntax_error_names_file_and_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(WorkloadError, match="cannot parse") as caught:
        Workload.parse(f"{path}:f")
    assert str(caught.value.where).startswith(f"{path}:")
    assert int(str(caught.value.where).rpartition(":")[2]) in (2, 3)


def test_a_file_that_is_not_text_does_not_parse(tmp_path: Path) -> None:
    path = tmp_path / "binary.py"
    path.write_bytes(b"\x00\xff")
    with pytest.raises(WorkloadError, match="cannot parse"):
        Workload.parse(str(path))


@pytest.mark.usefixtures("train")
def test_an_unknown_function_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        Workload.parse("train.py:make_wrokload")
    assert caught.value.remedy == "did you mean make_workload?"
    assert caught.value.where == "train.py"


@pytest.mark.parametrize(
    "text",
    [
        "def f(): ...",
        "class f: ...",
        "f = lambda: None",
        "f: object = lambda: None",
        "g, f = 1, 2",
        "if True:\n    def f(): ...",
        "try:\n    from fast import f\nexcept ImportError:\n    f = None",
        "from os import path as f",
        "import os as f",
        "with open('x') as f: ...",
        "from os.path import *",
    ],
)
def test_any_binding_of_a_module_name_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.py").write_text(text + "\n")
    assert Workload.parse(f"{tmp_path / 'm.py'}:f").function == "f"


@pytest.mark.parametrize("text", ["def g():\n    def f(): ...", "class A:\n    def f(self): ..."])
def test_names_inside_functions_and_classes_are_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.py").write_text(text + "\n")
    with pytest.raises(UnknownNameError):
        Workload.parse(f"{tmp_path / 'm.py'}:f")


@pytest.mark.usefixtures("train")
def test_arguments_that_cannot_be_pickled_are_refused_immediately() -> None:
    with pytest.raises(InvalidArgumentError, match="JSON"):
        Workload.parse("train.py:make_workload", n=object())


@pytest.mark.usefixtures("train")
def test_a_technique_gives_a_new_workload_and_preserves_this_one() -> None:
    plain = Workload.parse("train.py:make_workload")
    with_amp = plain.with_technique(*technique.parse("amp:bf16"))
    assert plain.techniques == ()
    assert with_amp.techniques == technique.parse("amp:bf16")
    assert with_amp.target == plain.target


@pytest.mark.usefixtures("train")
def test_a_pickled_workload_is_equal() -> None:
    sent = Workload.parse("train.py:make_workload", n=3).with_technique(*technique.parse("amp"))
    received = workload_of(sent.to_json())
    assert received.path == sent.path.resolve()
    assert (received.function, received.arguments) == ("make_workload", {"n": 3})
    assert received.techniques == sent.techniques


def test_live_objects_are_copied_together_and_stay_in_their_process() -> None:
    import torch

    model = torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()
    workload = Workload.of(
        model,
        (torch.ones(4, 2), torch.ones(4, 1)),
        torch.nn.functional.mse_loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    built = workload.build()
    first, second = float(built.step()), float(built.step())
    assert second < first, "the optimizer's copy steps the model's copy"
    assert torch.equal(model.weight, before)
    assert float(workload.build().step()) == first, "each build starts from scratch"
    with pytest.raises(WorkloadError, match=r"\blive objects\b"):
        workload.to_json()


def test_live_objects_that_cannot_be_copied_are_refused() -> None:
    import torch

    def generator() -> object:
        yield

    with pytest.raises(InvalidArgumentError, match="cannot be copied"):
        Workload.of(torch.nn.Linear(1, 1), generator())


@pytest.mark.usefixtures("train")
def test_a_workload_of_a_file_is_not_built_here() -> None:
    with pytest.raises(WorkloadError, match="child process"):
        Workload.parse("train.py:make_workload").build()


def test_possible_workload_functions_are_found(tmp_path: Path) -> None:
    path = tmp_path / "many.py"
    path.write_text(
        "def pair(n=1):\n    return model, batch\n"
        "def mapping():\n    return {'model': model}\n"
        "def built():\n    return ss.BuiltWorkload(model)\n"
        "def needs(n):\n    return model, batch\n"
        "def keyword(*, n):\n    return model, batch\n"
        "def number():\n    return 3\n"
        "def main():\n    print(pair())\n"
    )
    assert workload_functions(path) == ["pair", "mapping", "built"]
    path.write_text("def f(:")
    assert workload_functions(path) == []
