"""Analyses during editing: early numbers, errors at the user's line, no leftover processes."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
from live_workloads import LIMIT_S, TRAIN

from slipstream.child import Child
from slipstream.child.fork_server import ForkServer
from slipstream.errors import ChildError, SlipstreamError
from slipstream.live import Analysis, Analyst
from slipstream.live.queue import Kind, Queue

Start = Callable[..., Analyst]


def until(holds: Callable[[], bool]) -> None:
    """Wait for an event that is certain to come."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def finished(analyst: Analyst, number: int) -> Analysis:
    return analyst.wait(number, timeout_s=LIMIT_S)


def test_first_numbers_precede_the_full_result_and_add_up(train: Path, analyst_of: Start) -> None:
    analyst = analyst_of(train)
    states: list[str] = []
    analyst.listen(lambda view: states.append(view.state))
    found = finished(analyst, analyst.analyse())
    assert list(dict.fromkeys(states)) == ["recording", "first", "recorded", "ready"]
    assert list(found.after_s) == ["first", "recorded", "ready"]
    costs = found.costs
    assert costs is not None
    total = sum(line.total_ns for line in costs.lines) + costs.untracked.total_ns
    assert total == pytest.approx(costs.step_ns, rel=1e-9)
    held = sum(line.peak_bytes for line in costs.lines) + costs.untracked.peak_bytes
    assert held == costs.peak_bytes > 0
    assert costs.samples == 16
    assert {line.line for line in costs.lines if line.path == str(train)} >= {12, 13}
    # No user code ran in this process.
    assert not any(getattr(m, "__file__", "") == str(train) for m in list(sys.modules.values()))


def test_equal_text_is_not_analysed_twice_and_earlier_text_is_cached(
    train: Path, analyst_of: Start
) -> None:
    analyst = analyst_of(train)
    first = finished(analyst, analyst.analyse())
    assert analyst.analyse() == first.number
    train.write_text(TRAIN.replace("batch_size=16", "batch_size=24"))
    second = finished(analyst, analyst.analyse())
    assert second.costs is not None
    assert second.costs.samples == 24
    train.write_text(TRAIN)
    third = finished(analyst, analyst.analyse())
    assert third.number > second.number
    assert third.costs == first.costs
    assert third.graph == first.graph
    assert [entry["samples"] for entry in analyst.history] == [16, 24]


def test_a_save_that_changes_no_code_runs_nothing_and_moves_the_lines(
    train: Path, analyst_of: Start
) -> None:
    analyst = analyst_of(train)
    first = finished(analyst, analyst.analyse())
    assert first.costs is not None
    states: list[str] = []
    analyst.listen(lambda view: states.append(view.state))
    train.write_text("# a comment\n\n" + TRAIN.replace("# samples", "# of samples"))
    second = finished(analyst, analyst.analyse())
    assert second.number > first.number
    assert set(states) == {"recording", "ready"}
    assert second.costs is not None
    assert second.costs.step_ns == first.costs.step_ns
    assert second.costs.work == first.costs.work != ""

    def moved(lines: Any) -> set[tuple[int, float]]:
        return {(line.line, line.total_ns) for line in lines if line.path == str(train)}

    assert moved(second.costs.lines) == {(n + 2, ns) for n, ns in moved(first.costs.lines)}
    assert [module.made for module in second.costs.modules] != [
        module.made for module in first.costs.modules
    ]
    # Its questions are answered from the same recording.
    assert analyst.simulate("accumulation:4")["samples"] == 64
    assert len(analyst.history) == 1
    assert finished(analyst, analyst.analyse(again=True)).graph != second.graph
    assert len(analyst.history) == 2


def test_the_prediction_for_an_edit_may_arrive_after_the_edit(
    train: Path, analyst_of: Start
) -> None:
    analyst = analyst_of(train)
    train.write_text(TRAIN.replace("lr=0.1", "lr=0.2"))
    assert finished(analyst, analyst.analyse()).expected is None
    digest = hashlib.sha256(train.read_bytes()).hexdigest()
    analyst.expect(digest, {"change": "another rate"})
    assert finished(analyst, analyst.analyse()).expected == {"change": "another rate"}
    assert len(analyst.history) == 1


def test_batches_of_a_step_with_equal_work_are_not_measured_again(
    train: Path, analyst_of: Start
) -> None:
    analyst = analyst_of(train, steps=1, batches=True, batch_budget_s=0.05)
    first = finished(analyst, analyst.analyse())
    assert first.batch is not None
    train.write_text(TRAIN.replace("lr=0.1", "lr=0.2"))
    second = finished(analyst, analyst.analyse())
    assert second.batch is first.batch
    assert len(analyst.history) == 2
    train.write_text(TRAIN.replace("width=32", "width=64"))
    third = finished(analyst, analyst.analyse())
    assert third.batch is not first.batch


FAULTS = {
    "syntax": (TRAIN.replace("self.second(hidden)", "self.second(hidden"), 13, "cannot parse"),
    "import": ("import no_such_module_at_all\n" + TRAIN, 1, "no_such_module_at_all"),
    "step": (
        TRAIN.replace("return self.second(hidden)", "return self.second(hidden[0] @ hidden)"),
        13,
        "RuntimeError",
    ),
    "build": (TRAIN.replace("model = Net(width)", "model = Net(undefined)"), 17, "NameError"),
    "name": (TRAIN.replace("make_workload", "make_another"), 0, "make_workload"),
    "returns": (TRAIN.replace("return model, batch, nn.", "return 7, nn."), 0, ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_is_reported_at_its_line_and_the_next_save_is_analysed(
    name: str, train: Path, analyst_of: Start
) -> None:
    text, line, message = FAULTS[name]
    analyst = analyst_of(train, steps=1)
    train.write_text(text)
    found = finished(analyst, analyst.analyse())
    assert found.state == "failed"
    problem = found.problem
    assert problem is not None
    assert problem.path == str(train)
    assert message in problem.what
    if line:
        assert problem.line == line
    assert analyst.analyse() != found.number
    train.write_text(TRAIN)
    mended = finished(analyst, analyst.analyse())
    assert mended.state == "ready"
    assert mended.problem is None


def test_numbers_of_the_previous_text_stay_with_an_error(train: Path, analyst_of: Start) -> None:
    analyst = analyst_of(train, steps=1)
    good = finished(analyst, analyst.analyse())
    train.write_text("def make_workload(:\n")
    bad = finished(analyst, analyst.analyse())
    assert bad.problem is not None
    assert bad.problem.line == 1
    assert bad.stale
    assert bad.costs == good.costs


def test_a_file_that_does_not_parse_yet_can_be_watched(train: Path, analyst_of: Start) -> None:
    train.write_text("def make_workload(:\n")
    analyst = analyst_of(train, steps=1)
    assert finished(analyst, analyst.watch()).state == "failed"
    train.write_text(TRAIN)
    until(lambda: analyst.latest.state == "ready")
    with pytest.raises(SlipstreamError):
        Analyst(str(train.parent / "nothing.py"))


PROVIDERS = """\
import torch
from torch import nn


def skyline_model_provider():
    return nn.Linear(8, 4)


def skyline_input_provider(batch_size=16):
    return torch.randn(batch_size, 8), torch.randn(batch_size, 4)


def skyline_iteration_provider(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def iteration(*inputs):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[0]), inputs[1]).backward()
        optimizer.step()

    return iteration
"""
WRONG_PROVIDERS = {
    "missing": (PROVIDERS.replace("skyline_iteration_provider", "iteration_provider"), 0),
    "arguments": (PROVIDERS.replace("(batch_size=16)", "(batch_size)"), 9),
    "a tensor": (PROVIDERS.replace(", torch.randn(batch_size, 4)\n\n", "\n\n"), 9),
}


@pytest.mark.parametrize("name", WRONG_PROVIDERS)
def test_an_invalid_provider_is_reported_and_a_corrected_one_analysed(
    name: str, tmp_path: Path, server: ForkServer
) -> None:
    text, line = WRONG_PROVIDERS[name]
    path = tmp_path / "providers.py"
    path.write_text(PROVIDERS)
    with Analyst(
        str(path), threads=1, steps=1, techniques=None, batches=False, server=server,
        timeout_s=LIMIT_S,
    ) as analyst:  # fmt: skip
        path.write_text(text)
        found = finished(analyst, analyst.analyse())
        assert found.problem is not None
        assert found.problem.path == str(path)
        assert "provider" in found.problem.what
        assert line in (0, found.problem.line)
        path.write_text(PROVIDERS)
        found = finished(analyst, analyst.analyse())
        assert found.costs is not None
        assert found.costs.samples == 16


LOOP = TRAIN.replace(
    "        return self.second(hidden)",
    "        while True:\n            time.sleep(0.005)",
).replace("import torch\n", "import time, pathlib\nimport torch\n", 1)


def test_an_endless_loop_is_stopped_and_named(train: Path, analyst_of: Start) -> None:
    train.write_text(LOOP)
    analyst = analyst_of(train, steps=1, timeout_s=15.0)
    found = finished(analyst, analyst.analyse())
    assert found.problem is not None
    assert (found.problem.path, found.problem.line) in [(str(train), 14), (str(train), 15)]
    assert "did not answer" in found.problem.what


def test_a_newer_save_stops_the_running_analysis_and_its_processes(
    train: Path, analyst_of: Start
) -> None:
    marker = train.parent / "pid"
    train.write_text(
        LOOP.replace(
            "        while True:",
            f"        pathlib.Path({str(marker)!r}).write_text(str(__import__('os').getpid()))\n"
            "        while True:",
        )
    )
    analyst = analyst_of(train, steps=1)
    analyst.analyse()
    until(lambda: marker.exists() and marker.read_text() != "")
    pid = int(marker.read_text())
    assert pid != os.getpid()
    train.write_text(TRAIN)
    found = finished(analyst, analyst.analyse())
    assert found.state == "ready"
    assert not psutil.pid_exists(pid)


def test_closing_stops_the_processes_and_removes_the_recordings(
    train: Path, analyst_of: Start
) -> None:
    analyst = analyst_of(train, steps=1)
    found = finished(analyst, analyst.analyse())
    assert found.graph is not None
    folder = found.graph.parent.parent
    assert folder.exists()
    analyst.close()
    assert not folder.exists()
    assert analyst.analyse() == found.number


def test_an_edit_does_not_wait_for_a_device_measurement(server: ForkServer) -> None:
    queue = Queue(server)
    with ThreadPoolExecutor(1) as pool:
        command = {"args": ["sleep", "30"]}
        measuring = pool.submit(queue.call, Kind.MEASURING, "subprocess:call", **command)
        try:
            assert queue.call(Kind.EDITING, "os:getpid") != os.getpid()
            assert not measuring.done()
        finally:
            queue.close()
        with pytest.raises(ChildError):
            measuring.result()
    with pytest.raises(ChildError, match="has ended"):
        queue.call(Kind.EDITING, "os:getpid")


def test_jobs_of_a_kind_run_sequentially_and_cancelling_one_stops_its_processes() -> None:
    queue, order, started = Queue(), [], Event()

    def measure() -> None:
        with Child("sleeping") as child:
            child.start_call("subprocess:call", args=["sleep", "30"])
            order.append(child.pid)
            started.set()
            child.finish_call()

    first = queue.submit(Kind.ANALYSING, measure)
    waiting = queue.submit(Kind.ANALYSING, lambda: order.append(-1))
    assert started.wait(LIMIT_S)
    queue.cancel(Kind.ANALYSING)
    after = queue.submit(Kind.ANALYSING, lambda: order.append(-2))
    after.result.result(LIMIT_S)
    assert order[1:] == [-2]
    assert not psutil.pid_exists(order[0])
    assert isinstance(first.result.exception(), ChildError)
    assert waiting.result.cancelled()
    queue.close()
    assert queue.submit(Kind.ANALYSING, lambda: None).result.cancelled()
