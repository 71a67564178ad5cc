"""Failures of the user's code give one message with place and remedy, and the right exit code."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest

_BAD = """\
import os, sys, time, torch
def raises():
    raise OSError("cannot open the data set")
def too_big():
    return torch.zeros(1 << 45)
def vanishes():
    os._exit(5)
def wrong():
    return "a model", 3
"""


@pytest.mark.parametrize(
    ("function", "message", "where", "remedy"),
    [
        ("too_big", str(4 << 45), "bad.py:5", "batch"),
        ("vanishes", "exited with code 5", "", "os._exit"),
        ("wrong", "str, int", "bad.py:8", "(model, batch, loss, optimizer)"),
    ],
)
def test_a_failing_function_is_reported(
    slipstream: Any, function: str, message: str, where: str, remedy: str
) -> None:
    (slipstream.folder / "bad.py").write_text(_BAD)
    error = slipstream.refused(1, "profile", f"bad.py:{function}", "--json")
    assert message in error.what
    assert where in error.where
    assert remedy in error.remedy


def test_ascii_terminals_a_file_as_home_and_non_ascii_names_work(
    slipstream: Any, recorded: Any
) -> None:
    shutil.copy(recorded.path, slipstream.folder / "über.slipgraph")
    home = slipstream.folder / "home"
    home.touch()
    del slipstream.environment["XDG_CACHE_HOME"]
    slipstream.environment.update({"HOME": str(home), "PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    process = slipstream.start("predict", "über.slipgraph", "-t", "inference_mode")
    shown, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "us per step" in shown
    assert "this terminal shows ascii only" in stderr


def test_debug_shows_the_users_traceback_wherever_the_option_is(slipstream: Any) -> None:
    (slipstream.folder / "bad.py").write_text(_BAD)
    run = slipstream("profile", "bad.py:raises", "--debug")
    assert run.returncode == 1
    assert re.search(r"^error: OSError\b", run.stderr, re.MULTILINE)
    assert "bad.py:3" in run.stderr
    assert 'bad.py", line 3, in raises' in run.stderr
    assert run.stderr.count("in raises") == 1, "shown once"


def test_a_function_that_loops_forever_is_stopped(slipstream: Any) -> None:
    (slipstream.folder / "loop.py").write_text("import time\nwhile True:\n    time.sleep(0.01)\n")
    run = slipstream("profile", "loop.py", "--timeout", "4s")
    assert run.returncode == 1
    assert re.search(r"\b4 s\b.*\bstopped\b", run.stderr)
    assert "--timeout" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "needle", "remedy"),
    [
        (("profile", "trian.py"), 1, "'trian.py'", " train.py"),
        (("profile", "nope.py"), 1, "'nope.py'", "broken.py, train.py"),
        (("profile", "train"), 2, "'train'", " train.py"),
        (("profile", "broken.py:f"), 1, "    def f(:", ""),
        (("profile", "train.py:make"), 2, "'make'", "make_workload"),
        (("profile", "train.py", "--set", "n=1"), 2, "--set", " --"),
        (("profile", "train.py", "--set", "n=1"), 2, "--set", "train.py:make_workload"),
        (("profile", "train.py:make_workload", "--set", "3"), 2, "'3'", "batch_size=64"),
        (("profile", "train.py:make_workload", "--", "x"), 2, "", "--set"),
        (("profile", "train.py", "--epochs", "1"), 2, "--epochs", "train.py -- --epochs"),
        (("profile", "train.py", "--steps", "0"), 2, "--steps", "profile --help"),
        (("profile", "train.py", "--steps", "few"), 2, "--steps", "profile --help"),
        (("profile", "train.py", "--timeout", "long"), 2, "'long'", "60s"),
        (("profile", "train.py", "-o", "run.json"), 2, ".slipgraph", "-o run.slipgraph"),
        (("profile", "train.py", "-o", "no/run.slipgraph"), 2, "'no'", "mkdir -p no"),
        (("report", "train.py", "-o", "no/run.html"), 2, "'no'", "mkdir -p no"),
        (("cluster", "measure", "-o", "no/here.toml"), 2, "'no'", "mkdir -p no"),
        (("profile", "train.py", "--record", "region"), 2, "'region'", "regions"),
        (("profile", "run.slipgraph"), 2, "run.slipgraph", "advise"),
        (("profile",), 2, "'WORKLOAD'", "profile --help"),
        (("profil",), 2, "'profil'", ""),
        (("train.py",), 2, "'train.py'", "slipstream profile train.py\n"),
        (("train.py:make", "-t", "amp"), 2, "'train.py:make'", " profile train.py:make\n"),
        (("run.slipgraph",), 2, "'run.slipgraph'", "slipstream advise run.slipgraph\n"),
        (("explain", "broken.py"), 2, "broken.py", "slipstream profile broken.py -o"),
        (("explain", "train.py"), 2, "train.py", "slipstream profile train.py:make_workload"),
        (("explain", "train.py:make"), 2, "train.py:make", "slipstream profile train.py:make -o"),
        (("advise", "gone.slipgraph"), 1, "'gone.slipgraph'", "profile"),
    ],
)
def test_an_impossible_request_is_refused_before_anything_runs(
    slipstream: Any, arguments: tuple[str, ...], code: int, needle: str, remedy: str
) -> None:
    (slipstream.folder / "broken.py").write_text("x = 1\ndef f(:\n")
    error = slipstream.refused(code, *arguments)
    assert needle in error.what
    assert remedy in error.remedy
    assert "importing" not in error.before


def test_a_closed_pipe_is_not_an_error(slipstream: Any) -> None:
    process = slipstream.start("--help")
    process.stdout.close()
    process.wait(600)
    assert process.stderr.read() == ""


def test_a_file_without_a_step_reports_its_functions_and_misplaced_options(slipstream: Any) -> None:
    error = slipstream.refused(1, "profile", "train.py", "--", "-o", "x.slipgraph")
    assert re.search(r"\boptimizer step\b", error.what)
    assert "(model, batch, loss, optimizer)" in error.remedy
    assert "train.py:make_workload" in error.remedy
    assert "'-o x.slipgraph'" in error.before


def test_a_function_that_parses_arguments_is_reported_as_a_script(slipstream: Any) -> None:
    (slipstream.folder / "main.py").write_text(
        "import argparse\ndef main():\n    argparse.ArgumentParser().parse_args(['--no'])\n"
    )
    error = slipstream.refused(1, "apply", "main.py:main", "-t", "amp")
    assert "main()" in error.what
    assert "main.py -- ARGS" in error.remedy
