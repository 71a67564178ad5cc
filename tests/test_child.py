"""User code runs in a child; every outcome gives a clear answer and leaves no process."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from slipstream.child import Channel, Child, channel, process, start_with
from slipstream.errors import (
    ChildDiedError,
    ChildError,
    InvalidArgumentError,
    MeasurementError,
    WorkloadError,
)

# User code; each test names the function it needs. Line numbers are asserted: keep the order.
_USER = """\
import os, signal, subprocess, sys, time
state = []
def double(x): return 2 * x
def remember(x): state.append(x); return state
def divide(x):
    return 1 / x
def deep(): return divide(0)
def need(): raise ModuleNotFoundError("Try `pip install thing`")
def part(): import json.a_part_nobody_has
def leave(code): sys.exit(code)
def vanish(code): os._exit(code)
def hang():
    while True: time.sleep(0.01)
def hang_after_talking():
    for n in range(100): print("a line of chatter", n)
    hang()
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def crash():
    print("about to crash")
    os.kill(os.getpid(), signal.SIGSEGV)
def shout(n): return "x" * n
def not_json(): return object()
def where_am_i(): return os.getcwd()
def variable(name): return os.environ.get(name)
def hoard(mib):
    held = bytearray(mib << 20)
    return len(held)
def family():
    inner = "import time; time.sleep(600)"
    return [subprocess.Popen([sys.executable, "-c", inner]).pid for _ in range(2)]
def orphan():
    if os.fork() == 0:
        time.sleep(600)
    os._exit(3)
def ours():
    from slipstream.errors import InvalidArgumentError
    raise InvalidArgumentError("rank", "is negative", where="m.py:3", remedy="as 4")
def measured():
    from slipstream.errors import MeasurementError
    raise MeasurementError("it raised", arm="fast", block=7)
def talk(n, size):
    from slipstream.child import channel
    total = 0
    for _ in range(n):
        channel().send({"data": "y" * size})
        total += len(channel().receive()["data"])
    return total
def both_at_once(size):
    from slipstream.child import channel
    channel().send({"data": "y" * size})
    return len(channel().receive()["data"])
def chatter():
    import time
    from slipstream.child import channel
    while True:
        channel().send({"say": "still here"})
        time.sleep(0.01)
def fails_before_listening():
    raise KeyError("gone")
def wants_cuda(): raise AssertionError("Torch not compiled with CUDA enabled")
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Child]:
    (tmp_path / "user_code.py").write_text(_USER)
    (tmp_path / "unfinished.py").write_text("x = 1\ndef broken(:\n")
    (tmp_path / "needs_more.py").write_text("import a_package_nobody_has\n")

    def begin(**options: object) -> Child:
        environment = {"PYTHONPATH": str(tmp_path), **options.pop("environment", {})}  # type: ignore[dict-item]
        return Child(environment=environment, **options)  # type: ignore[arg-type]

    return begin


@pytest.fixture
def child(start: Callable[..., Child]):
    with start() as process:
        yield process


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _eventually(condition: Callable[[], bool], patience_s: float = 600.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def _line(text: str) -> int:
    return next(n for n, line in enumerate(_USER.splitlines(), 1) if text in line)


def test_calls_are_answered_and_share_one_process(child: Child) -> None:
    assert child.call("user_code:double", x=21) == 42
    assert child.call("user_code:remember", x=1) == [1]
    assert child.call("user_code:remember", x="two") == [1, "two"]


def test_it_runs_in_its_folder_and_environment(start: Callable[..., Child], tmp_path: Path) -> None:
    with start(environment={"A_VARIABLE": "set"}, directory=tmp_path) as child:
        assert child.call("user_code:where_am_i") == str(tmp_path)
        assert child.call("user_code:variable", name="A_VARIABLE") == "set"


def test_an_error_names_file_line_and_source(child: Child, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as caught:
        child.call("user_code:deep")
    assert caught.value.where == f"{tmp_path / 'user_code.py'}:{_line('return 1 / x')}"
    assert "ZeroDivisionError" in caught.value.what
    assert "return 1 / x" in caught.value.what
    assert "Traceback" in caught.value.__notes__[0]
    assert child.call("user_code:double", x=1) == 2  # it is still alive


def test_a_syntax_error_names_its_line(child: Child, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as caught:
        child.call("unfinished:broken")
    assert caught.value.where == f"{tmp_path / 'unfinished.py'}:2"
    assert "SyntaxError" in caught.value.what


def test_a_missing_package_is_named(child: Child) -> None:
    with pytest.raises(WorkloadError) as caught:
        child.call("needs_more:anything")
    assert "install 'a_package_nobody_has'" in (caught.value.remedy or "")
    with pytest.raises(WorkloadError, match="Try `pip install thing`") as caught:
        child.call("user_code:need")
    assert "install" not in (caught.value.remedy or "")
    with pytest.raises(WorkloadError) as caught:
        child.call("user_code:part")
    assert "'json' has no 'a_part_nobody_has' here" in (caught.value.remedy or "")


def test_an_unknown_function_is_named(child: Child) -> None:
    for name in ("user_code:absent", "user_code:state"):
        with pytest.raises(InvalidArgumentError, match="is not module:function"):
            child.call(name)


def test_sys_exit_is_an_error_and_not_the_end(child: Child) -> None:
    with pytest.raises(WorkloadError, match="SystemExit: 3") as caught:
        child.call("user_code:leave", code=3)
    assert "exits the process" in (caught.value.remedy or "")
    assert child.call("user_code:double", x=1) == 2


def test_our_own_errors_arrive_complete(child: Child) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        child.call("user_code:ours")
    error = caught.value
    assert (error.what, error.where, error.remedy) == ("rank: is negative", "m.py:3", "as 4")
    assert error.argument == "rank"
    with pytest.raises(MeasurementError) as measured:
        child.call("user_code:measured")
    assert (measured.value.arm, measured.value.block) == ("fast", 7)
    assert measured.value.where == "arm fast, block 7"


def test_a_result_that_is_not_json_is_an_error(child: Child) -> None:
    with pytest.raises(WorkloadError, match=r"\bnot_json\b.*\bJSON\b"):
        child.call("user_code:not_json")
    assert child.call("user_code:double", x=1) == 2


def test_os_exit_is_reported(child: Child) -> None:
    with pytest.raises(ChildError, match=r"exited with code 5"):
        child.call("user_code:vanish", code=5)


def test_a_hang_is_stopped_and_located(child: Child, tmp_path: Path) -> None:
    child.call("user_code:double", x=1)
    with pytest.raises(ChildError, match=r"\b0\.5 s\b") as caught:
        child.call("user_code:hang", timeout_s=0.5)
    assert caught.value.where == f"{tmp_path / 'user_code.py'}:{_line('while True')}"
    assert _gone(child.pid)
    with pytest.raises(ChildError, match="was stopped"):
        child.call("user_code:double", x=1)


def test_a_hang_after_much_output_is_located(child: Child, tmp_path: Path) -> None:
    child.call("user_code:double", x=1)
    with pytest.raises(ChildError) as caught:
        # Long enough for the output, also on a busy machine.
        child.call("user_code:hang_after_talking", timeout_s=3.0)
    assert caught.value.where == f"{tmp_path / 'user_code.py'}:{_line('while True')}"


def test_a_kill_by_the_system_is_reported(child: Child) -> None:
    with pytest.raises(ChildDiedError, match=r"\bkilled\b") as caught:
        child.call("user_code:killed")
    assert "memory" in (caught.value.remedy or "")


def test_a_crash_shows_the_output_before_it(child: Child) -> None:
    with pytest.raises(ChildDiedError, match="SIGSEGV") as caught:
        child.call("user_code:crash")
    assert "about to crash" in caught.value.what


def test_the_memory_limit_makes_allocations_fail_without_killing_the_child(
    start: Callable[..., Child],
) -> None:
    with start(memory_limit_bytes=256 << 20) as child:
        assert child.call("user_code:hoard", mib=16) == 16 << 20
        with pytest.raises(WorkloadError, match="MemoryError") as caught:
            child.call("user_code:hoard", mib=512)
        assert "out of memory" in (caught.value.remedy or "")
        assert child.call("user_code:hoard", mib=16) == 16 << 20


@pytest.mark.parametrize("size", [10, 1 << 17, 3_000_000])
def test_large_messages_pass_in_both_directions(child: Child, size: int) -> None:
    assert len(child.call("user_code:shout", n=size)) == size
    got: list[int] = []

    def answer(message: dict[str, str]) -> None:
        got.append(len(message["data"]))
        child.send({"data": "z" * size})

    assert child.call("user_code:talk", n=3, size=size, on_message=answer, timeout_s=60) == 3 * size
    assert got == [size] * 3


def test_a_call_ends_at_its_deadline_whatever_it_sends(child: Child) -> None:
    with pytest.raises(ChildError, match="was stopped"):
        child.call("user_code:chatter", timeout_s=60, until=time.monotonic() + 0.1)


def test_both_sides_may_send_more_than_the_pipe_holds_simultaneously(child: Child) -> None:
    size = 1_000_000
    child.start_call("user_code:both_at_once", size=size)
    child.send({"data": "z" * size})
    assert len(child.receive(timeout_s=60)["data"]) == size
    assert child.finish_call(timeout_s=60) == size


def test_messages_for_a_failed_function_do_not_reach_the_next(child: Child) -> None:
    child.start_call("user_code:fails_before_listening")
    child.send({"go": 1})
    with pytest.raises(WorkloadError, match="gone"):
        child.finish_call()
    assert child.call("user_code:double", x=4) == 8


def test_sending_to_a_dead_child_reports_it(child: Child) -> None:
    child.call("user_code:double", x=1)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ChildDiedError, match=r"\bkilled\b"):
        child.call("user_code:double", x=1)


def test_a_fork_that_holds_the_pipe_does_not_hide_the_death(child: Child) -> None:
    with pytest.raises(ChildError, match="exited with code 3"):
        child.call("user_code:orphan", timeout_s=60)


def test_grandchildren_end_with_the_child(start: Callable[..., Child]) -> None:
    with start() as child:
        pids = child.call("user_code:family")
        assert not any(map(_gone, pids))
    assert _eventually(lambda: all(map(_gone, pids)))


def test_closing_leaves_no_process_no_zombie_no_file(start: Callable[..., Child]) -> None:
    child = start()
    child.call("user_code:double", x=1)
    fds = len(os.listdir("/proc/self/fd"))
    child.close()
    child.close()
    assert not psutil.pid_exists(child.pid)
    assert not child.log_path.exists()
    # Both pipes and the log.
    assert len(os.listdir("/proc/self/fd")) == fds - 3


def test_a_closed_child_cannot_be_called(start: Callable[..., Child]) -> None:
    child = start()
    child.close()
    with pytest.raises(ChildError, match="was stopped"):
        child.call("user_code:double", x=1)


def test_it_cannot_start_in_a_missing_folder(tmp_path: Path) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ChildError, match=r"\bstarted\b.*\bNo such file\b"):
        Child(directory=tmp_path / "absent")
    assert len(os.listdir("/proc/self/fd")) == fds


def test_ctrl_c_before_it_starts_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupted() -> NoReturn:
        assert list(tmp_path.glob("slipstream-*.log"))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pipe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Child()
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_it_starts_leaves_no_file_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    processes: list[subprocess.Popen[bytes]] = []

    def interrupted(*arguments: Any, **options: Any) -> NoReturn:
        processes.append(subprocess.Popen(*arguments, **options))
        raise KeyboardInterrupt

    fds = len(os.listdir("/proc/self/fd"))
    with start_with(interrupted), pytest.raises(KeyboardInterrupt):
        Child()
    assert processes[0].wait(30) == 0
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == fds


def test_it_outlives_the_thread_that_started_it(start: Callable[..., Child]) -> None:
    started: list[Child] = []
    thread = threading.Thread(target=lambda: started.append(start()))
    thread.start()
    thread.join()
    with started[0] as child:
        assert child.call("user_code:double", x=2) == 4


def _parent(tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "user_code.py").write_text(_USER)
    program = """
        import sys
        from slipstream.child import Child
        with Child(environment={"PYTHONPATH": sys.argv[1]}) as child:
            pids = child.call("user_code:family")
            print(child.pid, *pids, child.log_path, flush=True)
            child.call("user_code:hang")
        """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_ends_the_child_and_all_it_started(tmp_path: Path) -> None:
    parent = _parent(tmp_path)
    assert parent.stdout is not None
    *pids, log = parent.stdout.readline().split()
    parent.send_signal(signal.SIGINT)
    _, err = parent.communicate(timeout=600)
    assert "KeyboardInterrupt" in err
    assert _eventually(lambda: all(_gone(int(pid)) for pid in pids))
    assert not Path(log).exists()


def test_a_killed_parent_ends_the_child(tmp_path: Path) -> None:
    parent = _parent(tmp_path)
    assert parent.stdout is not None
    child, *grandchildren, log = parent.stdout.readline().split()
    parent.kill()
    parent.communicate(timeout=600)
    try:
        assert _eventually(lambda: _gone(int(child)))
    finally:
        # Nothing is left to end these: the price of kill -9.
        for pid in grandchildren:
            os.kill(int(pid), signal.SIGKILL)
        Path(log).unlink(missing_ok=True)


def test_outside_a_child_there_is_no_channel() -> None:
    with pytest.raises(ChildError, match="outside"):
        channel()


def test_a_channel_gives_up_on_a_dead_reader() -> None:
    read_end, write_end = os.pipe()
    other_read, other_write = os.pipe()
    ours = Channel(other_read, write_end)
    with pytest.raises(BrokenPipeError):
        ours.send({"data": "x" * 1_000_000}, alive=lambda: False)
    ours.close()
    with pytest.raises(BrokenPipeError, match="closed"):
        ours.send({})
    os.close(read_end)
    os.close(other_write)


def test_a_channel_gives_up_on_a_hanging_reader() -> None:
    read_fd, write_fd = os.pipe()
    other_read, other_write = os.pipe()
    end = Channel(other_read, write_fd)
    try:
        with pytest.raises(TimeoutError, match="does not read"):
            end.send({"much": "x" * 1_000_000}, timeout_s=0.2)
    finally:
        end.close()
        os.close(read_fd)
        os.close(other_write)


def test_a_hanging_child_that_does_not_read_is_stopped_and_located(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.child.process._MAX_SEND_S", 1.0)
    child.call("user_code:double", x=1)
    child.start_call("user_code:hang")
    with pytest.raises(ChildError, match=r"\bsent\b.*\b1 s\b") as error:
        child.send({"much": "x" * 1_000_000})
    assert str(error.value.where).startswith(str(tmp_path))
    assert _gone(child.pid)


def test_a_suspended_child_is_ended(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_MAX_SUSPENSION_S", 0.1)
    child.start_call("user_code:hang")
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ChildError, match="suspended"):
        child.finish_call(timeout_s=600)
    assert _gone(child.pid)


def test_processes_of_a_hanging_child_are_counted(child: Child) -> None:
    pids = child.call("user_code:family")
    with pytest.raises(ChildError, match=r"\b2 processes\b"):
        child.call("user_code:hang", timeout_s=0.3)
    assert all(_eventually(lambda pid=pid: _gone(pid)) for pid in pids)


def test_a_missing_device_is_distinguished_from_other_errors(child: Child) -> None:
    with pytest.raises(WorkloadError) as error:
        child.call("user_code:wants_cuda")
    assert re.search(r"\bGPU\b.*\bnone here\b", str(error.value.remedy))
