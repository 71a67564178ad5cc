"""Training scripts in many styles go through every command, or get a sentence on what to do."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from slipstream.graph import Graph, StepPhase, load
from slipstream_bench.scripts import SCRIPTS, Script

_SAMPLE = ("bare_loop", "gan", "ten_steps", "inference", "manual_sgd")
_TECHNIQUES = ("-t", "amp:bf16", "-t", "allocator:keep", "-t", "fused_optimizer:fused")
_PHASES = {
    "training": {StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER},
    "inference": {StepPhase.FORWARD},
}
_BY_NAME = {script.name: script for script in SCRIPTS}
_WITH_STEPS = [script for script in SCRIPTS if script.kind != "none"]


def cases(scripts: Iterable[Script], sample: tuple[str, ...] = ()) -> Any:
    """Run a test for each script; for those outside `sample` only in full runs."""
    return pytest.mark.parametrize(
        "script",
        [
            pytest.param(s, id=s.name, marks=[] if s.name in sample else [pytest.mark.full])
            for s in scripts
        ],
    )


def run(shell: Any, verb: str, script: Script, *options: object) -> Any:
    """Run ``slipstream VERB SCRIPT``, which must succeed without a traceback."""
    for package in script.packages:
        pytest.importorskip(package)
    shutil.copy(script.path, shell.folder)
    arguments = ("--", *script.arguments) if script.arguments else ()
    return succeeded(shell(verb, script.path.name, "--threads", 1, *options, *arguments))


def succeeded(done: Any) -> Any:
    """Check that a command succeeded, and return what it printed."""
    assert done.returncode == 0, done.stderr
    for sign in ("Traceback", "slipstream itself failed"):
        assert sign not in done.stderr + done.stdout
    return done


def recorded(shell: Any, script: Script) -> Graph:
    """Profile four steps of the script into ``run.slipgraph`` and check the graph."""
    run(shell, "profile", script, "--steps", 4, "-o", "run.slipgraph")
    graph = load(shell.folder / "run.slipgraph")
    assert graph.tasks.duration_ns.min() >= 0
    assert graph.tasks.gap_ns.min() >= 0
    busy = graph.tasks.duration_ns > 0
    assert {StepPhase(phase) for phase in graph.tasks.phase[busy]} >= _PHASES[script.kind]
    return graph


def phases_of_operators(graph: Graph) -> Counter[tuple[int, str]]:
    """Count the tasks by phase and name, without page faults, which depend on the heap."""
    pairs = zip(graph.tasks.phase.tolist(), graph.texts("name"), strict=True)
    return Counter(pair for pair in pairs if pair[1] != "page faults")


@cases(SCRIPTS, sample=_SAMPLE)
def test_a_script_is_profiled_predicted_and_reported(slipstream: Any, script: Script) -> None:
    if script.kind == "none":
        shutil.copy(script.path, slipstream.folder)
        error = slipstream.refused(1, "profile", script.path.name, "--steps", 4)
        assert script.sentence in error.remedy
        return
    recorded(slipstream, script)
    succeeded(slipstream("predict", "run.slipgraph", *_TECHNIQUES))
    succeeded(slipstream("report", "run.slipgraph", "--no-what-if", "-o", "run.html"))
    assert "<html" in (slipstream.folder / "run.html").read_text()


@cases([s for s in SCRIPTS if s.same_step], sample=("plain_closure",))
def test_a_step_with_a_closure_runs_the_same_operators_in_the_same_phases(
    slipstream: Any, script: Script
) -> None:
    with_closure, without = (
        phases_of_operators(recorded(slipstream, s)) for s in (script, _BY_NAME[script.same_step])
    )
    assert without <= with_closure
    # Lightning divides and copies the loss when it calls `backward` itself.
    assert with_closure.total() <= 1.05 * without.total()


@cases(_WITH_STEPS)
def test_a_script_is_advised_applied_and_proved(slipstream: Any, script: Script) -> None:
    chosen = ("-t", script.technique)
    run(slipstream, "advise", script, "--time-limit", "60s")
    run(slipstream, "apply", script, *chosen)
    brief = ("--steps", 4, "--budget", "10s", "--launches", 1)
    assert script.technique in run(slipstream, "prove", script, *chosen, *brief).stdout
