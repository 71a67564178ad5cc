"""Arms: functions, workers and commands, and their failures."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from slipstream.errors import ChildError, InvalidArgumentError, MeasurementError, WorkloadError
from slipstream.measure.arms import (
    CallableArm,
    CommandArm,
    WorkerArm,
    checked_sample,
    command_words,
    time_calls,
    time_calls_on_device,
    time_function,
)

HERE = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])}


def worker(sample, *, setup="workers:setup", **arguments):
    return WorkerArm("a", setup, sample, sample_arguments=arguments, environment=HERE)


@pytest.fixture
def opened():
    arms = []

    def open_it(arm):
        arms.append(arm)
        arm.open(600)
        return arm

    yield open_it
    for arm in arms:
        arm.close()


# Functions in this process.


def test_a_function_is_called_as_often_as_requested_and_times_are_per_call(opened):
    calls = []
    arm = opened(CallableArm("a", lambda: calls.append(time.sleep(0.002))))
    sample = arm.sample(5, None)
    assert len(calls) == 5
    assert sample["wall"] >= 2e6
    assert sample["cpu"] < sample["wall"]


def test_all_arms_are_timed_by_the_same_code_without_overhead_in_the_loop(opened):
    seen = []

    def look():
        frame = sys._getframe(1)
        seen.append((frame.f_code, frame.f_lasti))

    for name in ("a", "b"):
        opened(CallableArm(name, look)).sample(3, None)
    codes = {code for code, _ in seen}
    assert codes == {time_calls.__code__}
    assert len({instruction for _, instruction in seen}) == 1


def test_a_device_is_synchronised_before_the_clock_starts_and_stops():
    order = []
    times = time_calls_on_device(lambda: order.append("call"), 2, lambda: order.append("finish"))
    assert order == ["finish", "call", "call", "finish"]
    assert times.wall > 0


def test_an_exception_of_a_function_shows_its_line(opened):
    def broken():
        raise ValueError("the loss is not a number")

    with pytest.raises(MeasurementError, match="the loss is not a number") as error:
        opened(CallableArm("a", broken)).sample(1, None)
    assert "test_arms.py" in str(error.value.where)


def test_a_function_that_exits_does_not_end_the_process(opened):
    with pytest.raises(MeasurementError, match="exit the process"):
        opened(CallableArm("a", lambda: sys.exit(3))).sample(1, None)


def test_a_function_that_hangs_is_stopped(opened):
    with pytest.raises(MeasurementError, match=r"\b0\.2 s\b"):
        opened(CallableArm("a", lambda: time.sleep(30))).sample(1, 0.2)


def test_an_uncallable_arm_is_refused():
    with pytest.raises(InvalidArgumentError, match="is not callable"):
        CallableArm("a", 3)


# Workers.


def test_a_worker_keeps_its_setup_and_answers_per_sample(opened):
    arm = opened(worker("workers:sample_with_pid"))
    first, second = arm.sample(1, 600), arm.sample(1, 600)
    assert first["pid"] == second["pid"] != os.getpid()
    assert first["wall"] > 0
    assert first["cpu"] > 0


def test_setup_gets_its_arguments_and_its_error_shows(opened):
    arm = WorkerArm("a", "workers:setup", "workers:sample", arguments={"fail": True},
                    environment=HERE)  # fmt: skip
    with pytest.raises(WorkloadError, match="the model cannot be built") as error:
        opened(arm)
    assert "workers.py" in str(error.value.where)


def test_phases_of_a_worker_are_metrics(opened):
    assert "forward.wall" in opened(worker("workers:sample_phases")).sample(1, 600)


@pytest.mark.parametrize("sample", ["workers:not_a_sample", "workers:not_finite"])
def test_an_invalid_sample_is_refused(opened, sample):
    with pytest.raises(MeasurementError, match="sample"):
        opened(worker(sample, setup=None)).sample(1, 600)


def test_a_hanging_worker_is_killed_and_the_place_named(opened):
    arm = opened(worker("workers:hangs_at", call=1))
    with pytest.raises(ChildError, match=r"\b1 s\b") as error:
        arm.sample(1, 1)
    assert "workers.py" in str(error.value.where)


def test_a_worker_that_ends_reports_its_exit_code(opened):
    with pytest.raises(ChildError, match="code 3"):
        opened(worker("workers:ends_at", call=1)).sample(1, 600)


def test_only_module_colon_function_is_accepted():
    with pytest.raises(InvalidArgumentError, match="not module:function"):
        WorkerArm("a", "workers.setup", "workers:sample")


def test_one_sample_as_a_worker_returns_it():
    sample = checked_sample(time_function(lambda: sum(range(100)), inner=10))
    assert {"wall", "cpu"} <= set(sample)


@pytest.mark.parametrize("value", [True, "3", None, float("nan")])
def test_a_sample_holds_finite_numbers_only(value):
    with pytest.raises(MeasurementError, match=r"'?extra\b"):
        checked_sample({"wall": 1.0, "extra": value})


# Commands.


def test_a_command_is_measured_with_its_children_and_its_own_peak(opened):
    # The memory and CPU time are those of a grandchild; the parent's are small.
    work = "x = bytearray(100 << 20); sum(range(10**6))"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}], check=True)"
    sample = opened(CommandArm("a", [sys.executable, "-c", code])).sample(1, 600)
    assert 100 << 20 < sample["peak_memory"] < 160 << 20
    assert 0 < sample["cpu"] < 1e11
    assert sample["wall"] > 0


def test_a_small_command_does_not_inherit_a_large_parents_peak(opened):
    ballast = bytearray(300 << 20)
    sample = opened(CommandArm("a", "true")).sample(1, 600)
    assert sample["peak_memory"] < 60 << 20
    assert len(ballast)


def test_a_failing_command_shows_its_output(opened):
    code = "import sys; print('no such data set'); sys.exit(4)"
    with pytest.raises(MeasurementError, match="status 4") as error:
        opened(CommandArm("a", [sys.executable, "-c", code])).sample(1, 600)
    assert "no such data set" in str(error.value)


def test_a_hanging_command_is_killed_with_its_children(opened, tmp_path):
    beat = tmp_path / "beat"
    beat.touch()
    code = f"while true; do date +%N > {beat}; sleep 0.05; done"
    arm = opened(CommandArm("a", ["/bin/sh", "-c", code]))
    with pytest.raises(ChildError, match=r"\b1 s\b"):
        arm.sample(1, 1)
    last = beat.read_text()
    time.sleep(0.3)
    assert beat.read_text() == last


def test_a_command_runs_in_its_folder_and_environment(opened, tmp_path):
    command = 'test "$COLOUR" = red && test -e here'
    (tmp_path / "here").touch()
    arm = CommandArm("a", command, directory=tmp_path, environment={"COLOUR": "red"})
    assert opened(arm).sample(1, 600)["wall"] > 0


def test_a_missing_program_is_named_before_anything_runs():
    with pytest.raises(InvalidArgumentError, match="'no-such-program'") as error:
        CommandArm("a", "no-such-program --flag")
    assert error.value.argument == "command"
    assert "PATH" in str(error.value.remedy)


@pytest.mark.parametrize("command", ["", "   ", []])
def test_an_empty_command_is_refused(command):
    with pytest.raises(InvalidArgumentError, match="empty"):
        command_words(command)


def test_only_shell_syntax_needs_a_shell():
    assert command_words("ls -l 'a b'") == ["ls", "-l", "a b"]
    assert command_words("ls | wc") == ["/bin/sh", "-c", "ls | wc"]
    with pytest.raises(InvalidArgumentError, match="quotation"):
        command_words("ls 'a")


def test_the_preparation_of_a_sample_is_called_once_and_not_timed():
    calls = []
    arm = CallableArm("a", lambda: calls.append("run"), prepare=lambda: calls.append("prepare"))
    arm.open(None)
    arm.sample(3, None)
    arm.close()
    assert calls == ["prepare", "run", "run", "run"]


def test_cpu_time_of_a_thread_excludes_other_threads():
    def elsewhere():
        thread = threading.Thread(target=lambda: sum(range(2_000_000)))
        thread.start()
        thread.join()

    cpu = {}
    for own_thread in (False, True):
        arm = CallableArm("a", elsewhere, own_thread=own_thread)
        arm.open(None)
        cpu[own_thread] = arm.sample(1, None)["cpu"]
        arm.close()
    assert cpu[True] < 0.5 * cpu[False]
