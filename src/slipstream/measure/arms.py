"""What is compared: a function in this process, a worker process, or a whole command.

An arm gives one sample at a time, only when asked, so that one arm computes while the others
wait. A sample is a mapping of metric to value *per call*. Times are read around a loop that is
the same code object for every arm; nothing of ours runs inside it.
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

# A call that takes this long is a sample by itself: a training step, an inference. It holds
# 20,000 clock reads and one or two slices of the scheduler.
MINIMUM_SAMPLE_NS = 5_000_000
# Shorter calls are repeated for about this long: recording a block in the store costs 0.2 ms.
REPEATED_SAMPLE_NS = 10_000_000
# Empty samples from which the cost of reading the clocks is taken; a quarter of a millisecond.
_CLOCK_READS = 100
_FLOAT32 = struct.Struct("f")
# Shell syntax: a command that uses it is run by a shell, any other directly.
_SHELL = set("|&;<>$`*?~#\n")


class ArmEndedError(MeasurementError):
    """The arm has nothing more to measure and did not fail; the remedy says how it would."""


class Arm(ABC):
    """One side of a comparison.

    Attributes:
        name: as shown.
        description: command, technique or function, in words.
        repeatable: whether a sample may hold many calls; else one sample is one call.
        process: where samples are taken: in ``"this"`` one, in its ``"own"`` from `open` to
            `close`, or in a fresh one for every ``"sample"``.
        notes: what whoever reads its numbers must know of them; complete once it is open.
    """

    repeatable = False
    process: Home = "this"

    def __init__(self, name: str, description: str = "") -> None:
        self.name = name
        self.description = description
        self.notes: tuple[str, ...] = ()

    def open(self, timeout_s: float | None) -> None:  # noqa: B027 - many arms need nothing
        """Get ready, in the thread that will ask for samples; anew after every `close`."""

    @abstractmethod
    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        """One sample of `inner` calls, per call; nanoseconds, bytes.

        Raises:
            SlipstreamError: the arm failed, or did not answer within `timeout_s`.
            ArmEndedError: it has no more samples; what was measured counts.
        """

    def afterwards(self, timeout_s: float | None) -> Mapping[str, Any]:
        """What else is to be seen of it, once nothing is timed any more; kept as an event.

        Returns:
            The event's details (JSON); empty: nothing.

        Raises:
            SlipstreamError: it could not be seen; what was measured counts.
        """
        return {}

    def close(self) -> None:  # noqa: B027
        """Give back what `open` took; may be called twice."""


class CallableArm(Arm):
    """A function in this process, called without arguments.

    CPU time is that of the whole process, so that the threads of a library count. A function
    that hangs in native code cannot be stopped from within its own process; use `WorkerArm`.

    Args:
        prepare: called before every sample, outside its clocks; a warm cache is the function
            itself.
        own_thread: CPU time of the calling thread alone, for a function that computes in no other.
        repeatable: False where a sample must be one call, however short.
        synchronize: called after the last call inside the clock, so that work a device still
            does is measured; `torch.cuda.synchronize` is found by itself once CUDA is in use.
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
                f"{function!r} cannot be called",
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
        """Find out how to read run-queue delays, and what reading the clocks costs."""
        self.close()
        self._delay.open()
        self._holds_alarm = alarm.hold()
        self._clock_cost_ns = clock_cost_ns(self._delay.read, self._cpu)

    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        """Wall, CPU and run-queue delay of `inner` calls, per call; phases as ``NAME.wall``."""
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
        """Shape of what one call returns, nested as returned; None where it has none or raises."""
        with contextlib.suppress(SlipstreamError), users_code(timeout_s):
            return _shape_of(self.function())
        return None

    def close(self) -> None:
        """Close what reads run-queue delays, and give back the alarm."""
        self._delay.close()
        if self._holds_alarm:
            self._holds_alarm = False
            alarm.release()


class WorkerArm(Arm):
    """A long-lived process of its own, asked for one sample at a time over a pipe.

    ``setup`` runs once, ``sample`` for every sample; both are ``"module:function"``, importable
    in the worker, and take JSON arguments. They share the worker's modules, so what `setup`
    keeps in a global is there for `sample`. `sample` returns a mapping of metric to number with
    at least ``"wall"`` (ns); `slipstream.measure.arms.timed` makes one. What it measures itself
    (``"cpu"``, ``"peak_memory"``, ``"wire_payload"``, ...) is recorded as it is.

    Args:
        setup: or None when there is nothing to build.
        arguments: of `setup`.
        sample_arguments: of `sample`.
        environment: variables set in the worker on top of ours.
        directory: where it runs; ours by default.
        memory_limit_bytes: private memory above which its allocations fail.
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
        """What `setup` returned, once it is open."""

    def open(self, timeout_s: float | None) -> None:
        """Start the process and run `setup`, which must answer within `timeout_s`."""
        self._child = self._start()
        if self._setup is not None:
            self.built = self._child.call(self._setup, timeout_s=timeout_s, **self._arguments)

    def sample(self, inner: int, timeout_s: float | None) -> Sample:
        """What the worker's sample function returns; `inner` is always 1."""
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
    """A whole command in a fresh process per sample: wall, CPU with children, peak memory.

    The command is started by a small launcher process, because a process inherits the peak
    memory of the one that started it. What it prints is shown only when it fails.

    Args:
        command: words, or one string as typed in a shell (run by ``sh`` only when it uses shell
            syntax).
        directory: where it runs; ours by default.

    Raises:
        InvalidArgumentError: an empty command, or a program that is not found.
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
    """The words of a command, its program found.

    Raises:
        InvalidArgumentError: an empty command, bad quoting, or a program that is not found.
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
        raise InvalidArgumentError("command", "it is empty", remedy='as --base-cmd "python a.py"')
    program = words[0]
    # A name with a slash is one from `directory`, and stays what it is where it is absolute.
    path = str(directory / program) if directory is not None and os.sep in program else program
    if shutil.which(path) is None:
        raise InvalidArgumentError(
            "command",
            f"'{program}' was not found, or may not be run",
            remedy="check the spelling and PATH; try it in this folder on its own first",
        )
    return words


def checked_sample(answer: object) -> dict[Metric, float]:
    """What a worker returned as a sample.

    Raises:
        MeasurementError: not a mapping of names to finite numbers with ``"wall"`` in it.
    """
    if not isinstance(answer, Mapping) or "wall" not in answer:
        raise MeasurementError(
            f"a sample must be a mapping with 'wall' in nanoseconds, not {answer!r:.80}",
            remedy="return slipstream.measure.timed(step) from the sample function",
        )
    values: dict[Metric, float] = {}
    for metric, value in answer.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise MeasurementError(
                f"the sample's '{metric}' is {value!r:.80}, not a finite number",
                remedy="leave out what cannot be measured",
            )
        values[metric] = float(value)
    return values


def timed(function: Callable[[], object], inner: int = 1) -> dict[Metric, float]:
    """One sample of `function` as a worker returns it: wall, CPU, run-queue delay and phases.

    All per call, in nanoseconds.
    """
    arm = _one_off()
    arm.function = function
    return dict(arm.sample(inner, None))


@cache
def _one_off() -> CallableArm:
    arm = CallableArm("sample", _nothing)
    arm.open(None)
    return arm


# The timed loop. One code object for all arms; `repeat` costs about 10 ns a call and calls
# nothing of Python's.


@dataclass(frozen=True)
class Times:
    """What one sample took, in nanoseconds; `delay` is None where it cannot be read."""

    wall: int
    cpu: int
    delay: int | None


# The order of the clocks matters. Reading a CPU clock makes Linux notice that a time slice is over
# and switch at once, so preemptions gather at that call: between it and the wall clock they would
# be charged to neither. The run-queue delay is therefore read on the wall clock's side of it.
# Wall time is innermost: an empty sample adds 200 ns to it. The CPU clock spans the other reads,
# about 2 microseconds, which `clock_cost_ns` measures and the arm takes off.


def time_calls(
    function: Callable[[], object],
    inner: int,
    read_delay: Callable[[], bytes] = bytes,
    wall: Callable[[], int] = time.perf_counter_ns,
    cpu: Callable[[], int] = time.process_time_ns,
) -> Times:
    """What `inner` calls took."""
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
    """As `time_calls`, with one `finish` before the clock starts and one inside it at the end."""
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
    """CPU nanoseconds that reading the clocks adds to a sample: the median of some empty ones."""
    return int(
        median(time_calls(_nothing, 0, read_delay, cpu=cpu).cpu for _ in range(_CLOCK_READS))
    )


def _nothing() -> None:
    pass


def delay_between(before: bytes, after: bytes) -> int | None:
    """Nanoseconds in the queue between two readings of ``schedstat``; None without them."""
    try:
        # Three numbers: time on a core, time waiting for one, time slices.
        return int(after.split()[1]) - int(before.split()[1])
    except (IndexError, ValueError):
        return None


def per_call(total: float, inner: int) -> float:
    """`total` / `inner` at 24 significant bits: 6e-8, far below a clock, and half the bytes."""
    return float(_FLOAT32.unpack(_FLOAT32.pack(total / inner))[0])


class RunDelay:
    """How long this thread was ready to run and waited for a core (Linux); elsewhere empty."""

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
        """Close it."""
        self.read = bytes
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class users_code:  # noqa: N801 - reads as a statement: with users_code(10.0):
    """Run a user's function: stop it after `seconds`, and say in their words what it raises.

    Only the main thread can be stopped, and only while Python code or an interruptible system
    call runs. Costs some microseconds where `alarm` is held, as it is while an arm is open.

    Raises:
        MeasurementError: the body raised, ended the process, or took longer than `seconds`.
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
                f"the arm ended the process (exit code {error.code})",
                remedy="take sys.exit out of the function that is measured",
            ) from error
        if isinstance(error, Exception):
            told = describe_error(error)
            raise MeasurementError(
                told["what"], where=told["where"], remedy=told["remedy"]
            ) from error


class _Alarm:
    """The process's alarm signal, ours while anybody holds it, then as it was before.

    Setting a timer costs tens of microseconds in a virtual machine. So the timer is left running
    from one sample to the next; when it rings too early for the current one, it is set again.
    """

    def __init__(self) -> None:
        self._holders = 0
        self._before: Any = None
        self._seconds = 0.0
        self._deadline = math.inf
        self._rings_at = math.inf

    def hold(self) -> bool:
        """Take the signal, if this thread may; each hold that says True needs a release."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not hasattr(signal, "setitimer"):
            return False
        if self._holders == 0:
            self._before = signal.signal(signal.SIGALRM, self._ring)
        self._holders += 1
        return True

    def release(self) -> None:
        """Give it back."""
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
        """What was started has ended."""
        self._deadline = math.inf

    def _ring(self, number: int, frame: object) -> None:
        left = self._deadline - time.monotonic()
        self._rings_at = math.inf
        if left > 0:
            if left < math.inf:
                self._rings_at = self._deadline
                signal.setitimer(signal.ITIMER_REAL, left)
            return
        self._deadline = math.inf
        raise MeasurementError(
            f"the arm did not return within {self._seconds:g} s and was stopped",
            remedy="is there an endless loop? if it is just slow, raise the timeout",
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
