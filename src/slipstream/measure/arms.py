"""Arms of a comparison: a function in this process, a worker process, or a command.

An arm returns one sample per request, so that one arm computes while the others wait. A sample
maps metrics to values *per call*. Clocks are read around a loop that is the same code object for
every arm and runs only the measured function.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import signal
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Literal

from slipstream.child import Child, describe_error
from slipstream.errors import ChildError, InvalidArgumentError, MeasurementError, SlipstreamError
from slipstream.measure import phases
from slipstream.measure.records import RUN_DELAY, Metric

Sample = Mapping[Metric, float]
Home = Literal["this", "own", "sample"]
"""Where samples are taken: see `Arm.process`."""

# A call at least this long is a complete sample, such as a training step or an inference. It
# equals 20,000 clock reads and one or two scheduler slices.
MINIMUM_SAMPLE_NS = 5_000_000
# Shorter calls are repeated for about this long: recording a block in the store costs 0.2 ms.
REPEATED_SAMPLE_NS = 10_000_000
# Empty samples for the cost of reading the clocks; they take a quarter of a millisecond.
_CLOCK_READS = 100
_FLOAT32 = struct.Struct("f")
# Shell syntax: a command with any of these characters runs in a shell, others run directly.
_SHELL = set("|&;<>$`*?~#\n")


class ArmEndedError(MeasurementError):
    """The arm has no more samples but did not fail; the remedy explains how to get more."""


class Arm(ABC):
    """One side of a comparison.

    Attributes:
        name: Name in tables.
        description: Command, technique or function.
        repeatable: Whether a sample may consist of several calls; otherwise of exactly one.
        process: Process that samples run in: ``"this"`` one, the arm's ``"own"`` from `open` to
            `close`, or a fresh one per ``"sample"``.
        notes: Caveats for readers of the results; complete once the arm is open.
    """

    repeatable = False
    process: Home = "this"

    def __init__(self, name: str, description: str = "") -> None:
        self.name = name
        self.description = description
        self.notes: tuple[str, ...] = ()

    def open(self, timeout_s: float | None) -> None:  # noqa: B027 - many arms need nothing
        """Prepare for `sample`, in the same thread; required again after each `close`."""

    @abstractmethod
    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        """Measure `inner` calls; return times per call in nanoseconds, memory in bytes.

        Raises:
            SlipstreamError: The arm failed, or did not return within `timeout_s`.
            ArmEndedError: The arm has no more samples; earlier ones count.
        """

    def afterwards(self, timeout_s: float | None) -> Mapping[str, Any]:
        """Return further observations after all timing (JSON), stored as an event if not empty.

        Raises:
            SlipstreamError: The observation failed; the samples count.
        """
        return {}

    def close(self) -> None:  # noqa: B027
        """Release the resources of `open`; may be called twice."""


class CallableArm(Arm):
    """A function in this process, called without arguments.

    CPU time is that of the whole process, which includes threads of libraries. A function that
    hangs in native code cannot be stopped from within its own process; use `WorkerArm` for it.

    Args:
        prepare: Function called before every sample, not timed; pass `function` for a warm cache.
        own_thread: Whether CPU time is that of the calling thread alone.
        repeatable: False if a sample must be exactly one call, even a short one.
        synchronize: Function called after the last call and timed, so that pending device work
            is measured; defaults to `torch.cuda.synchronize` once CUDA is in use.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[], object],
        description: str = "",
        *,
        prepare: Callable[[], object] | None = None,
        own_thread: bool = False,
        repeatable: bool = True,
        synchronize: Callable[[], object] | None = None,
    ) -> None:
        if not callable(function):
            raise InvalidArgumentError(
                f"arm '{name}'",
                f"{function!r} is not callable",
                remedy="pass a function without arguments: lambda: step(batch)",
            )
        super().__init__(name, description or getattr(function, "__qualname__", "a callable"))
        self.function = function
        self.repeatable = repeatable
        self._prepare = prepare
        self._cpu = time.thread_time_ns if own_thread else time.process_time_ns
        self._synchronize = synchronize
        self._delay = RunDelay()
        self._clock_cost_ns = 0
        self._holds_alarm = False

    def open(self, timeout_s: float | None) -> None:
        """Open the run-queue delay counter and measure the cost of reading the clocks."""
        self.close()
        self._delay.open()
        self._holds_alarm = alarm.hold()
        self._clock_cost_ns = clock_cost_ns(self._delay.read, self._cpu)

    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        """Return wall, CPU and run-queue delay in ns per call; phases as ``NAME.wall``."""
        finish = self._synchronize or _cuda_synchronize()
        with users_code(timeout_s):
            if self._prepare is not None:
                self._prepare()
            if finish is None:
                times = time_calls(self.function, inner, self._delay.read, cpu=self._cpu)
            else:
                times = time_calls_on_device(
                    self.function, inner, finish, self._delay.read, self._cpu
                )
        cpu = max(times.cpu - self._clock_cost_ns, 1)
        values = {"wall": per_call(times.wall, inner), "cpu": per_call(cpu, inner)}
        if times.delay is not None:
            values[RUN_DELAY] = per_call(times.delay, inner)
        for metric, total in phases.drain().items():
            values[metric] = per_call(total, inner)
        return values

    def result_shape(self, timeout_s: float | None = None) -> object:
        """Return the shapes of one call's result, nested like it; None without any or on error."""
        with contextlib.suppress(SlipstreamError), users_code(timeout_s):
            return _shape_of(self.function())
        return None

    def close(self) -> None:
        """Close the run-queue delay counter and release the alarm."""
        self._delay.close()
        if self._holds_alarm:
            self._holds_alarm = False
            alarm.release()


class WorkerArm(Arm):
    """A long-lived worker process that returns one sample per request over a pipe.

    `setup` runs once, `sample` once per sample; both are ``"module:function"``, importable in the
    worker, and take JSON arguments. They share the worker's modules, so `sample` can use globals
    that `setup` sets. `sample` returns a mapping of metric to number with at least ``"wall"``
    (ns), such as the result of `slipstream.measure.arms.time_function`. Further metrics
    (``"cpu"``, ``"peak_memory"``, ``"wire_payload"``, ...) are recorded unchanged.

    Args:
        setup: Function that builds the worker's state, or None.
        arguments: Arguments of `setup`.
        sample_arguments: Arguments of `sample`.
        environment: Variables to set in the worker, in addition to this process's.
        directory: Working directory; the current one by default.
        memory_limit_bytes: Private memory above which allocations fail.
    """

    process: Home = "own"

    def __init__(
        self,
        name: str,
        setup: str | None,
        sample: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        sample_arguments: Mapping[str, Any] | None = None,
        description: str = "",
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        memory_limit_bytes: int | None = None,
    ) -> None:
        super().__init__(name, description or sample)
        for argument, value in (("setup", setup), ("sample", sample)):
            if value is not None and value.count(":") != 1:
                raise InvalidArgumentError(argument, f"'{value}' is not module:function")
        self._setup = setup
        self._sample = sample
        self._arguments = dict(arguments or {})
        self._sample_arguments = dict(sample_arguments or {})
        self._start = partial(
            Child,
            f"the worker of arm '{name}'",
            environment=environment,
            directory=directory,
            memory_limit_bytes=memory_limit_bytes,
        )
        self._child: Child | None = None
        self.built: Any = None
        """Return value of `setup`, once the arm is open."""

    def open(self, timeout_s: float | None) -> None:
        """Start the process and run `setup`, which must return within `timeout_s`."""
        self._child = self._start()
        if self._setup is not None:
            self.built = self._child.call(self._setup, timeout_s=timeout_s, **self._arguments)

    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        """Return the result of the worker's sample function; `inner` is always 1."""
        if self._child is None:
            raise ChildError(f"the worker of arm '{self.name}' is not running")
        answer = self._child.call(self._sample, timeout_s=timeout_s, **self._sample_arguments)
        return checked_sample(answer)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.close()
            self._child = None


class CommandArm(WorkerArm):
    """A command in a fresh process per sample: wall, CPU with children, peak memory.

    A small launcher process starts the command, because a process inherits the peak memory of its
    parent. The command's output is shown only if it fails.

    Args:
        command: Words, or one string as typed in a shell (run by ``sh`` only if it uses shell
            syntax).
        directory: Working directory; the current one by default.

    Raises:
        InvalidArgumentError: The command is empty, or its program was not found.
    """

    process: Home = "sample"

    def __init__(
        self,
        name: str,
        command: str | Sequence[str],
        *,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
        description: str = "",
    ) -> None:
        self.words = command_words(command, directory)
        super().__init__(
            name,
            None,
            "slipstream.measure._launch:run",
            sample_arguments={
                "words": self.words,
                "directory": str(directory) if directory else None,
                "environment": dict(environment or {}),
            },
            description=description
            or (command if isinstance(command, str) else shlex.join(command)),
        )


def command_words(command: str | Sequence[str], directory: Path | None = None) -> list[str]:
    """Split a command into words and check that its program exists.

    Raises:
        InvalidArgumentError: The command is empty or badly quoted, or its program was not found.
    """
    if not isinstance(command, str):
        words = list(command)
    elif _SHELL & set(command):
        words = ["/bin/sh", "-c", command]
    else:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise InvalidArgumentError("command", f"{error} in: {command}") from None
    if not words or not words[0]:
        raise InvalidArgumentError(
            "command", "the command is empty", remedy='for example --base-cmd "python a.py"'
        )
    program = words[0]
    # A name with a slash is relative to `directory`, unless it is absolute.
    path = str(directory / program) if directory is not None and os.sep in program else program
    if shutil.which(path) is None:
        raise InvalidArgumentError(
            "command",
            f"'{program}' was not found or is not executable",
            remedy="check the spelling and PATH; run the command alone in this directory first",
        )
    return words


def checked_sample(answer: object) -> dict[Metric, float]:
    """Validate a worker's sample and return it.

    Raises:
        MeasurementError: It is not a mapping of names to finite numbers that has ``"wall"``.
    """
    if not isinstance(answer, Mapping) or "wall" not in answer:
        raise MeasurementError(
            f"a sample must be a mapping with 'wall' in nanoseconds, not {answer!r:.80}",
            remedy="return slipstream.measure.time_function(step) from the sample function",
        )
    values: dict[Metric, float] = {}
    for metric, value in answer.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise MeasurementError(
                f"the sample's '{metric}' is {value!r:.80}, not a finite number",
                remedy="leave out metrics that cannot be measured",
            )
        values[metric] = float(value)
    return values


def time_function(function: Callable[[], object], inner: int = 1) -> dict[Metric, float]:
    """Return wall, CPU, run-queue delay and phases of `function`, in ns per call."""
    arm = _one_off()
    arm.function = function
    return dict(arm.sample(inner, None))


@cache
def _one_off() -> CallableArm:
    arm = CallableArm("sample", _nothing)
    arm.open(None)
    return arm


# The timed loop is one code object for all arms; `repeat` costs about 10 ns per call and runs no
# Python code.


@dataclass(frozen=True)
class Times:
    """Times of one sample, in nanoseconds; `delay` is None if it cannot be read."""

    wall: int
    cpu: int
    delay: int | None


# The order of the clocks matters. Reading a CPU clock makes Linux notice that a time slice is over
# and switch immediately, so preemptions cluster at that call: between it and the wall clock they
# would be charged to neither. The run-queue delay is therefore read on the wall clock's side of it.
# Wall time is innermost: an empty sample adds 200 ns to it. The CPU clock spans the other reads,
# about 2 microseconds, which `clock_cost_ns` measures and the arm subtracts.


def time_calls(
    function: Callable[[], object],
    inner: int,
    read_delay: Callable[[], bytes] = bytes,
    wall: Callable[[], int] = time.perf_counter_ns,
    cpu: Callable[[], int] = time.process_time_ns,
) -> Times:
    """Time `inner` calls."""
    calls = repeat(None, inner)
    cpu_before = cpu()
    delay_before = read_delay()
    wall_before = wall()
    for _ in calls:
        function()
    wall_after = wall()
    delay_after = read_delay()
    cpu_after = cpu()
    delay = delay_between(delay_before, delay_after)
    return Times(wall_after - wall_before, cpu_after - cpu_before, delay)


def time_calls_on_device(
    function: Callable[[], object],
    inner: int,
    finish: Callable[[], object],
    read_delay: Callable[[], bytes] = bytes,
    cpu: Callable[[], int] = time.process_time_ns,
) -> Times:
    """Time `inner` calls like `time_calls`, with `finish` run before and, timed, at the end."""
    finish()
    cpu_before = cpu()
    delay_before = read_delay()
    wall_before = time.perf_counter_ns()
    for _ in repeat(None, inner):
        function()
    finish()
    wall_after = time.perf_counter_ns()
    delay_after = read_delay()
    cpu_after = cpu()
    delay = delay_between(delay_before, delay_after)
    return Times(wall_after - wall_before, cpu_after - cpu_before, delay)


def clock_cost_ns(
    read_delay: Callable[[], bytes], cpu: Callable[[], int] = time.process_time_ns
) -> int:
    """Return the CPU time that clock reads add to a sample, in ns: the median of empty samples."""
    return int(
        median(time_calls(_nothing, 0, read_delay, cpu=cpu).cpu for _ in range(_CLOCK_READS))
    )


def _nothing() -> None:
    pass


def delay_between(before: bytes, after: bytes) -> int | None:
    """Return ns in the run queue between two readings of ``schedstat``; None without them."""
    try:
        # Three numbers: time on a core, time waiting for a core, time slices.
        return int(after.split()[1]) - int(before.split()[1])
    except (IndexError, ValueError):
        return None


def per_call(total: float, inner: int) -> float:
    """Return `total` / `inner` in float32 precision, far finer than any clock, half the bytes."""
    return float(_FLOAT32.unpack(_FLOAT32.pack(total / inner))[0])


class RunDelay:
    """Reader of the time this thread was ready to run but had no core (Linux); else empty."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self.read: Callable[[], bytes] = bytes

    def open(self) -> None:
        """Open the counter of the calling thread."""
        self.close()
        with contextlib.suppress(OSError):
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self.read = partial(os.pread, self._fd, 128, 0)

    def close(self) -> None:
        """Close the counter."""
        self.read = bytes
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class users_code:  # noqa: N801 - reads as a statement: with users_code(10.0):
    """Run a user's function: stop it after `seconds`, and describe what it raises.

    Only the main thread can be stopped, and only while Python code or an interruptible system
    call runs. Costs a few microseconds if `alarm` is held, as it is while an arm is open.

    Raises:
        MeasurementError: The body raised, exited, or took longer than `seconds`.
    """

    __slots__ = ("_armed", "_seconds")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._armed = False

    def __enter__(self) -> None:
        if self._seconds is not None and alarm.hold():
            self._armed = True
            alarm.start(self._seconds)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._armed:
            alarm.stop()
            alarm.release()
        if error is None or isinstance(error, (SlipstreamError, KeyboardInterrupt)):
            return
        if isinstance(error, SystemExit):
            raise MeasurementError(
                f"the arm tried to exit the process (status {error.code})",
                remedy="remove sys.exit from the measured function",
            ) from error
        if isinstance(error, Exception):
            report = describe_error(error)
            raise MeasurementError(
                report["what"], where=report["where"], remedy=report["remedy"]
            ) from error


class _Alarm:
    """The process's alarm signal: taken over by the first hold, restored by the last release.

    Setting a timer costs tens of microseconds in a virtual machine. The timer therefore keeps
    running across samples; if it rings too early for the current one, it is set again.
    """

    def __init__(self) -> None:
        self._holders = 0
        self._before: Any = None
        self._seconds = 0.0
        self._deadline = math.inf
        self._rings_at = math.inf

    def hold(self) -> bool:
        """Take over the signal if this thread may; each hold that returns True needs a release."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not hasattr(signal, "setitimer"):
            return False
        if self._holders == 0:
            self._before = signal.signal(signal.SIGALRM, self._ring)
        self._holders += 1
        return True

    def release(self) -> None:
        """Undo one hold; restore the previous handler after the last."""
        self._holders -= 1
        if self._holders == 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._rings_at = math.inf
            signal.signal(signal.SIGALRM, self._before)

    def start(self, seconds: float) -> None:
        """Raise in the main thread after `seconds`, unless `stop` comes first."""
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        if self._rings_at > self._deadline:
            self._rings_at = self._deadline
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def stop(self) -> None:
        """Cancel the deadline of `start`."""
        self._deadline = math.inf

    def _ring(self, number: int, frame: object) -> None:
        remaining = self._deadline - time.monotonic()
        self._rings_at = math.inf
        if remaining > 0:
            if remaining < math.inf:
                self._rings_at = self._deadline
                signal.setitimer(signal.ITIMER_REAL, remaining)
            return
        self._deadline = math.inf
        raise MeasurementError(
            f"the arm did not return within {self._seconds:g} s and was stopped",
            remedy="check for an endless loop; if it is only slow, raise the timeout",
        )


alarm = _Alarm()


def _shape_of(value: object) -> object:
    if isinstance(value, (list, tuple)):
        shapes = tuple(_shape_of(item) for item in value)
        return shapes if any(shape is not None for shape in shapes) else None
    shape = getattr(value, "shape", None)
    return tuple(shape) if isinstance(shape, (tuple, list)) else None


def _cuda_synchronize() -> Callable[[], object] | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    synchronize: Callable[[], object] = torch.cuda.synchronize
    return synchronize
