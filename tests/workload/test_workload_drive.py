"""A user's function is imported as its author expects, and its steps report to a program."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from slipstream.workload import BuiltWorkload, Workload, drive

Run = Callable[..., Any]

_MAKE = """
import torch
def make(width=4, batch_size=2):
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(batch_size, 3), torch.randn(batch_size, 1)
    return model, batch, torch.nn.functional.mse_loss, optimizer
"""


def losses(built: BuiltWorkload) -> Generator[None, Any, list[float]]:
    """Return the results of three steps."""
    first, second, third = (yield), (yield), (yield)
    return [float(first), float(second), float(third)]


def glance(built: BuiltWorkload) -> Generator[None, Any, dict[str, Any]]:
    """Return the built workload, without a step."""
    weights = sum(p.numel() for p in built.model.parameters()) if built.model else 0
    return {"samples": built.samples, "weights": weights, "name": built.name}
    yield


def test_the_program_gets_the_result_of_each_step(drive_forked: Run) -> None:
    found = drive_forked(_MAKE, losses, function="make").result
    assert len(found) == 3
    assert found[2] < found[0]


def test_equal_seeds_give_equal_workloads(drive_forked: Run) -> None:
    first = drive_forked(_MAKE, losses, function="make").result
    assert drive_forked(_MAKE, losses, function="make").result == first


def test_arguments_reach_the_function(drive_forked: Run) -> None:
    arguments = {"batch_size": 7, "width": 5}
    found = drive_forked(_MAKE, glance, function="make", arguments=arguments).result
    assert found["samples"] == 7
    assert found["weights"] == (3 + 1) * 5 + (5 + 1)
    assert found["name"] == "train.py:make(batch_size=7, width=5)"


def test_an_unknown_argument_suggests_the_nearest(drive_forked: Run) -> None:
    outcome = drive_forked(_MAKE, glance, function="make", arguments={"batchsize": 7})
    assert outcome.error["kind"] == "UnknownNameError"
    assert outcome.error["remedy"] == "did you mean batch_size?"
    assert outcome.error["where"].endswith("train.py:3")


def test_a_missing_argument_is_named(drive_forked: Run) -> None:
    outcome = drive_forked("def make(a, b=1): ...", glance, function="make")
    assert "'a'" in outcome.what
    assert "--set a=VALUE" in outcome.error["remedy"]


def test_modules_next_to_the_file_are_found(drive_forked: Run, tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "our_parts.py").write_text(_MAKE)
    outcome = drive_forked("from our_parts import make", losses, function="make")
    assert len(outcome.result) == 3


def test_no_compiled_files_are_left_next_to_them(drive_forked: Run, tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "our_parts.py").write_text(_MAKE)
    drive_forked("from our_parts import make", losses, function="make")
    names = {path.name for path in (tmp_path / "user").rglob("*")}
    assert names == {"train.py", "our_parts.py"}


def test_a_file_may_have_the_name_of_an_imported_module(drive_forked: Run) -> None:
    text = _MAKE + "\nimport random as theirs\ntheirs.random()\n"
    assert len(drive_forked(text, losses, function="make", name="random.py").result) == 3


def test_a_class_of_the_file_can_be_pickled(drive_forked: Run) -> None:
    text = (
        "import pickle\n"
        "class Config: pass\n"
        "def make():\n"
        "    assert isinstance(pickle.loads(pickle.dumps(Config())), Config)\n"
        "    return lambda: 1.0\n"
    )
    assert drive_forked(text, losses, function="make").result == [1.0, 1.0, 1.0]


def test_code_under_main_does_not_run_for_a_function(drive_forked: Run) -> None:
    text = _MAKE + "\nif __name__ == '__main__': raise SystemExit('it ran')\n"
    assert drive_forked(text, losses, function="make").error is None


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("import a_package_nobody_has\n", 1, "a_package_nobody_has"),
        ("def make():\n    return 1 / 0\n", 2, "ZeroDivisionError"),
        ("def make():\n    def step():\n        raise OSError('gone')\n    return step", 3, "gone"),
        (_MAKE.replace("(batch_size, 3)", "(batch_size, 9)"), 3, "one step fails"),
        ("make = 3\n", None, " int,"),
        ("from os import *\n", None, "is not defined"),
        ("def make(): return 1, 2\n", 1, "tuple of int, int"),
    ],
)
def test_an_error_names_the_users_own_line(
    drive_forked: Run, text: str, line: int | None, message: str
) -> None:
    outcome = drive_forked(text, losses, function="make")
    assert message in outcome.what
    file, _, found = outcome.error["where"].rpartition(":")
    assert (file or found).endswith("train.py")
    assert line is None or int(found) == line
    assert outcome.error["remedy"]


def test_live_objects_are_driven_in_this_process() -> None:
    def unused(result: Any) -> Any:
        raise AssertionError("live objects return their result")

    workload = Workload.of(lambda: 2.5)
    assert drive(workload, losses, unused, keep_in=Path("unused")) == [2.5, 2.5, 2.5]


_DISTRIBUTED = """
import torch
from torch import distributed, nn

def make():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    return model, torch.randn(3, 2), lambda out: out.sum(), torch.optim.SGD(model.parameters(), 0.1)
"""


def test_a_function_that_joins_a_process_group_can_be_built_again(
    fork: Callable[[Callable[[], Any]], Any], tmp_path: Path
) -> None:
    path = tmp_path / "replicas.py"
    path.write_text(_DISTRIBUTED)
    workload = Workload.parse(f"{path}:make")

    def leave(result: Any) -> Any:
        raise AssertionError("a function returns its result")

    def twice() -> list[int]:
        return [len(drive(workload, losses, leave, keep_in=tmp_path)) for _ in range(2)]

    assert fork(twice).result == [3, 3]
