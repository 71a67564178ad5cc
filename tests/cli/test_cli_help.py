"""``slipstream --help``: the workflow first and in order, without loading torch."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from slipstream_bench.running import benches

FLOW = ("profile", "predict", "apply", "prove", "advise")
_HEAVY = {"torch", "numpy", "scipy"}
_ASK = """
import sys
from slipstream.cli import main
sys.argv = ["slipstream", *sys.argv[1:]]
try:
    main()
finally:
    print(*sorted({"torch", "numpy", "scipy"} & set(sys.modules)), file=sys.stderr)
"""


def listed(text: str) -> list[str]:
    """Return the commands in a help text, from top to bottom."""
    return [m[1] for m in re.finditer(r"^  ([a-z]+) {2,}\S", text, re.MULTILINE)]


def test_the_verbs_of_the_workflow_come_first_and_in_order(slipstream: Any) -> None:
    run = slipstream("--help")
    assert run.returncode == 0
    commands = listed(run.stdout)
    assert [name for name in commands if name in FLOW] == list(FLOW)
    assert commands[0] == "profile"
    tools = ("measure", "results", "data", "dedup", "bench", "doctor", "demo")
    assert [name for name in commands if name in tools] == list(tools)
    assert max(map(commands.index, FLOW)) < min(map(commands.index, tools))


@pytest.mark.parametrize("arguments", [(), *((verb,) for verb in FLOW), ("bench",), ("demo",)])
def test_help_loads_nothing_heavy(arguments: tuple[str, ...]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _ASK, *arguments, "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0
    assert "Usage: slipstream" in run.stdout
    assert run.stderr.split() == []


@pytest.mark.parametrize("arguments", [("bench",), ("bench", "--help")])
def test_benches_are_listed_without_running_one(
    slipstream: Any, arguments: tuple[str, ...]
) -> None:
    run = slipstream.briefly(*arguments)
    assert run.returncode == 0
    for name in benches():
        assert re.search(rf"^ *{name} +\w+", run.stdout, re.MULTILINE), run.stdout


def test_all_benches_run_on_that_word(slipstream: Any) -> None:
    assert "slipstream bench all" in slipstream.briefly("bench").stdout
    run = slipstream.briefly("bench", "--full")
    assert run.returncode == 2
    assert re.search(r"\bno bench\b", run.stderr)
    assert re.search(r"\btry: all\b.*\baccumulation, accuracy, adasum\b", run.stderr)


@pytest.mark.parametrize("verb", [*FLOW, "demo"])
def test_the_first_line_of_every_verb_describes_it(slipstream: Any, verb: str) -> None:
    text = slipstream.briefly(verb, "-h").stdout
    assert f"Usage: slipstream {verb}" in text
    assert re.search(r"^  [A-Z][^.]+\.$", text, re.MULTILINE)


def test_examples_are_on_separate_lines(slipstream: Any) -> None:
    slipstream.environment["COLUMNS"] = "80"
    for verb in FLOW:
        lines = [line.strip() for line in slipstream.briefly(verb, "--help").stdout.splitlines()]
        assert any(line.startswith(f"slipstream {verb} ") for line in lines), verb


def test_without_arguments_help_is_shown(slipstream: Any) -> None:
    run = slipstream()
    assert run.returncode == 0
    assert listed(run.stdout) == listed(slipstream.briefly("--help").stdout)


def test_python_m_slipstream_is_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "slipstream", "profile", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "Usage: slipstream profile" in run.stdout


def test_the_version_is_the_installed_one(slipstream: Any) -> None:
    from importlib.metadata import version

    run = slipstream("--version")
    assert (run.returncode, run.stdout) == (0, f"slipstream {version('slipstream')}\n")
    assert run.stderr == ""


@pytest.mark.parametrize("noun", ["measure", "results", "data"])
def test_a_noun_lists_its_verbs_with_full_sentences(slipstream: Any, noun: str) -> None:
    text = slipstream.briefly(noun, "--help").stdout
    assert len(listed(text)) >= 2
    assert "..." not in text.partition("Commands:")[2]
