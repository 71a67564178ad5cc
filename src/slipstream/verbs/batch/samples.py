"""What a step takes at several batch sizes: each is tried in a process of its own.

A size that does not fit ends that process, or its step with an error, and is told as such; the
caller lives on. Memory is read in a process that never had another size, since an allocator keeps
what a larger batch once needed. Time is read in one process that takes the sizes in turns, so that
a machine which grows slower meanwhile slows all of them.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream import heap
from slipstream.capture.closures import ClosureWatch
from slipstream.capture.memory import record_memory
from slipstream.capture.place import Place, find_device
from slipstream.child import Child
from slipstream.durations.durations import one_pool
from slipstream.errors import ChildDiedError, SlipstreamError, WorkloadError
from slipstream.graph import CLOSURE_RANGE
from slipstream.measure.memory import read_status_bytes
from slipstream.units import format_bytes
from slipstream.verbs.batch.segments import Least, Segments
from slipstream.verbs.children import run_program, workload_of
from slipstream.workload import BuiltWorkload, Workload, file_backups
from slipstream.workload.loaders import Loaders
from slipstream.workload.script import ScriptEndedError

ARGUMENT = "batch_size"
"""The argument of a function that sets its batch where the step hides it."""
_HOME = "slipstream.verbs.batch.samples"
# Optimizers make their state in the first step, and use it in the second.
_STEPS_TO_SETTLE = 3
# As torch annotates it.
_UPDATE = "Optimizer.step#"
_TURN_S = 0.1
_MOST_STEPS_A_TURN = 10
_FEWEST_TURNS = 4
_SETTLED = 0.01
_NO_MEMORY = (
    "can't allocate memory", "out of memory", "not enough memory", "bad_alloc", "MemoryError",
    "Cannot allocate memory", "could not create a", "std::length_error",
)  # fmt: skip
_OOM_SCORE, _FIRST_TO_DIE = Path("/proc/self/oom_score_adj"), "1000"
_NO_LOADER = (
    "a script's batch is that of the DataLoader it trains with, and this one has none with a "
    f"batch size; name a function with an argument {ARGUMENT}: train.py:make_workload"
)


@dataclass(frozen=True)
class BatchSample:
    """What was measured at one size.

    Attributes:
        samples: per step.
        step_ns: the least time of a step; of one that was not `timed` yet a rough value.
        spread: of that time, what measuring again may change, relative; infinite of such a one.
        tensor_bytes: the most that tensors take at once; 0 where it could not be seen.
        update_bytes: the same while the optimizer updates, which hardly depends on the batch; 0
            where that is not told apart.
        process_bytes: the most private memory of the whole process, or of the device what torch
            keeps; what a limit on memory counts.
    """

    samples: int
    step_ns: float
    spread: float
    tensor_bytes: int
    update_bytes: int
    process_bytes: int

    def timed(self, timing: Timing) -> BatchSample:
        """The same with the time that was taken since."""
        return replace(self, step_ns=timing.step_ns, spread=timing.spread)


@dataclass(frozen=True)
class Timing:
    """The least time of a step of one size; `spread` is what turns differ by, relative."""

    samples: int
    step_ns: float
    spread: float


@dataclass(frozen=True)
class Facts:
    """What the first process tells of a workload.

    Attributes:
        samples: per step, as it is.
        quantum: what sizes must be multiples of.
        resizes: whether the batch is there to be cut or repeated; else the function's argument
            ``batch_size`` says how large it is, or a script's loader.
        clock: "cpu" or "wall": whose time is taken.
        device: "cpu" or "cuda".
        device_bytes: that the device has; 0 for a CPU.
        loader: the batch size of the DataLoader that a script trains with; 0 for a function.
        mapped_bytes: of the process's address space, what is not private memory: libraries.
    """

    samples: int
    quantum: int
    resizes: bool
    clock: str
    device: str
    device_bytes: int
    loader: int = 0
    mapped_bytes: int = 0


class DoesNotFitError(SlipstreamError):
    """A step of that many samples does not fit into memory, or the data has fewer."""


class _TooFewError(WorkloadError):
    """A script's data has fewer samples than were asked for."""


class Sampler:
    """Within it, steps of one workload run at sizes that are asked for, never in this process.

    Args:
        limit_bytes: private memory above which a step counts as not fitting; None for no limit.
        timeout_s: a process that is silent for so long is stopped.
        report: called with a short line before anything slow.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        threads: int,
        limit_bytes: int | None,
        timeout_s: float,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._workload = workload
        self._threads = threads
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._report = report
        self._child: Child | None = None
        self.facts: Facts | None = None

    def first(self) -> BatchSample:
        """The size the workload has by itself; `facts` are known from then on.

        Raises:
            WorkloadError: the user's code failed, or its batch can be set nowhere.
            DoesNotFitError: not even this size fits.
        """
        self._report("the batch as it is")
        answer = self._call(0, "run_once", samples=0)
        facts = Facts(**answer["facts"])
        if not facts.resizes:
            # A script's step has as many samples as its loader gives, or a multiple of them.
            whole = facts.loader and facts.samples % facts.loader == 0
            quantum = facts.samples // facts.loader if whole else 0
            facts = replace(facts, quantum=quantum) if quantum else self._by_argument(facts)
        self.facts = facts
        return BatchSample(facts.samples, **answer["sample"])

    def sample(self, samples: int) -> BatchSample:
        """A step of so many samples, in a fresh process.

        Raises:
            DoesNotFitError: it does not fit.
            WorkloadError: it fails for another reason.
        """
        self._report(f"{samples} samples")
        assert self.facts is not None
        size = samples if self.facts.resizes else 0
        answer = self._call(samples, "run_once", samples=size)
        return BatchSample(samples, **answer["sample"])

    def needs(self, samples: int, processes: int = 3) -> list[int]:
        """The private memory of each of several processes that run a few steps of so many samples
        and do nothing else, for tight limits; nothing where they do not fit into one of them.

        What one size needs differs by some percent from process to process: where an allocator
        finds a hole is chance. Forks find those of their parent, so that these are none.
        """
        size = samples if self.facts is not None and self.facts.resizes else 0
        needs: list[int] = []
        for _ in range(processes):
            self._report(f"trying {samples} samples")
            try:
                answer = self._call(samples, "run_once", fork=False, samples=size, watch=False)
            except DoesNotFitError:
                return []
            needs.append(int(answer["sample"]["process_bytes"]))
        return needs

    def timings(self, sizes: Sequence[int], budget_s: float) -> list[Timing]:
        """The least time of a step at each of `sizes`, taken in turns.

        Raises:
            DoesNotFitError: one of them does not fit.
        """
        self._report(f"timing {len(sizes)} sizes in turns")
        rows = self._call(max(sizes), "take_turns", sizes=list(sizes), budget_s=budget_s)
        return [Timing(*row) for row in rows]

    def alone(self, samples: int, budget_s: float) -> Timing:
        """The least time of a step of so many samples, in a process that has no other size.

        Args:
            samples: where the function sets them (see `Facts.resizes`); 0 for the batch as it is.

        Raises:
            DoesNotFitError: it does not fit.
        """
        self._report(f"timing {samples} samples")
        rows = self._call(samples, "take_turns", sizes=[], budget_s=budget_s)
        ((_, step_ns, spread),) = rows
        return Timing(samples, step_ns, spread)

    def _sized(self, samples: int) -> Workload:
        """The workload whose function is asked for so many samples, where its step hides them."""
        facts = self.facts
        if not samples or facts is None or facts.resizes or facts.loader:
            return self._workload
        arguments = {**self._workload.arguments, ARGUMENT: samples}
        return replace(self._workload, arguments=arguments)

    def _loads(self, samples: int) -> list[int]:
        """Of a script: its loader's batch size, what that shall be, and samples of a step then."""
        facts = self.facts
        if not samples or facts is None or not facts.loader:
            return []
        return [facts.loader, samples // facts.quantum, samples]

    def _by_argument(self, facts: Facts) -> Facts:
        from slipstream.workload.built import HIDDEN_BATCH

        size = self._workload.arguments.get(ARGUMENT, facts.samples or self._default())
        if self._workload.function is None or not isinstance(size, int) or size < 1:
            raise WorkloadError(
                "this step's batch cannot be made another size from outside",
                where=self._workload.name,
                remedy=_NO_LOADER
                if self._workload.function is None
                else f"{HIDDEN_BATCH}, or one with an argument {ARGUMENT} "
                f"(given as --set {ARGUMENT}=N)",
            )
        return replace(facts, samples=size, quantum=1)

    def _default(self) -> Any:
        """The default of the function's argument, as its text has it; 0 where it has none."""
        tree = ast.parse(self._workload.path.read_bytes())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == self._workload.function:
                named = [*node.args.posonlyargs, *node.args.args][::-1]
                pairs = [
                    *zip(named, node.args.defaults[::-1], strict=False),
                    *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
                ]
                for argument, default in pairs:
                    if argument.arg == ARGUMENT and isinstance(default, ast.Constant):
                        return default.value
        return 0

    def _call(self, shown: int, function: str, *, fork: bool = True, **arguments: Any) -> Any:
        """A function of this file in a process of its own, at `shown` samples; 0: the batch as it
        is.

        Args:
            fork: whether that is a copy of one that has imported what it needs, to save time.
        """
        workload = self._sized(shown)
        called = f"{_HOME}:{function}"
        with file_backups() as keep_in:
            arguments |= {
                "workload": workload.to_json(), "keep_in": str(keep_in),
                "threads": self._threads, "loads": self._loads(shown),
            }  # fmt: skip
            try:
                if fork:
                    return self._answer(
                        self._warm(), "slipstream.child:call_in_fork",
                        called=called, arguments=arguments,
                    )  # fmt: skip
                with self._start() as child:
                    return self._answer(child, called, **arguments)
            except SlipstreamError as error:
                ended = shown and isinstance(error, ScriptEndedError)
                if ended or isinstance(error, _TooFewError):
                    remedy = "smaller sizes, or more data"
                    raise DoesNotFitError(error.what, remedy=remedy) from error
                if not _is_memory(error):
                    raise
                what = f"{shown} samples" if shown else "the batch as it is"
                limit = self._limit_bytes
                raise DoesNotFitError(
                    f"a step of {what} does not fit into "
                    + ("memory" if limit is None else format_bytes(limit)),
                    remedy="a smaller batch, or a larger --limit",
                ) from error

    def _answer(self, child: Child, function: str, **arguments: Any) -> Any:
        return child.call(
            function, timeout_s=self._timeout_s, on_message=lambda message: None, **arguments
        )

    def _start(self) -> Child:
        return Child(
            self._workload.name,
            environment=one_pool(self._threads),
            memory_limit_bytes=self._limit_bytes,
        )

    def _warm(self) -> Child:
        """A process that has imported what steps need and never ran one: it is forked for each."""
        if self._child is None:
            self._child = self._start()
            self._child.call(f"{_HOME}:warm_up", timeout_s=self._timeout_s)
        return self._child

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *error: object) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def _is_memory(error: SlipstreamError) -> bool:
    """Whether `error` is how a lack of memory shows, in Python or as a process that died."""
    if isinstance(error, ChildDiedError):
        return True
    # As torch and the libraries below it say it.
    return any(words in error.what for words in _NO_MEMORY)


# What follows runs in a child, most of it in forks of the one that ran `warm_up`.


def warm_up() -> None:
    """Import what a step needs. Nothing is computed: threads would not survive a fork."""
    for name in ("torch", "torch._dynamo", "torch.profiler"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def run_once(
    workload: dict[str, Any],
    keep_in: str,
    threads: int,
    samples: int,
    loads: list[int],
    watch: bool = True,
) -> Any:
    """What a few steps of `samples` need, 0 for as many as the workload has.

    Args:
        loads: see `_run`.
        watch: whether to see what tensors take, for which a profiler needs memory of its own.
    """

    def steps(built: BuiltWorkload, loader: int) -> Generator[None, Any, dict[str, Any]]:
        if samples:
            built.resize(samples)
        place = find_device(built)
        for _ in range(_STEPS_TO_SETTLE - 1):
            yield
        clock = _clock(place)
        began = clock()
        yield
        step_ns = clock() - began
        process, mapped = _process_bytes(place)
        most, updating = (yield from _tensor_bytes(built, place)) if watch else (0, 0)
        return {
            "sample": {
                "step_ns": step_ns, "spread": math.inf, "tensor_bytes": most,
                "update_bytes": updating, "process_bytes": process,
            },
            "facts": {**_facts(built, place), "loader": loader, "mapped_bytes": mapped},
        }  # fmt: skip

    return _run(workload, keep_in, threads, loads, steps)


def take_turns(
    workload: dict[str, Any],
    keep_in: str,
    threads: int,
    sizes: list[int],
    loads: list[int],
    budget_s: float,
) -> Any:
    """``[samples, ns, spread]`` of each size: turns until they tell the same twice.

    Without sizes, of the batch as it is. The process keeps its pages: whether a step has page
    faults differs from size to size and from launch to launch, and lies on no line.

    Args:
        loads: see `_run`.
    """

    def turns(built: BuiltWorkload, loader: int) -> Generator[None, Any, list[list[float]]]:
        heap.keep_pages()
        yield
        least = {size: Least() for size in sizes or [0]}
        began = time.monotonic()
        with Segments(built, _clock(find_device(built))) as segments:
            while not _enough(least, time.monotonic() - began, budget_s):
                for size, one in least.items():
                    if size:
                        built.resize(size)
                    # The one before had another size: caches and heap are as that left them.
                    yield
                    gc.collect()
                    one.turn((yield from _turn(segments)))
        return [[size, one.step_ns, one.spread] for size, one in least.items()]

    return _run(workload, keep_in, threads, loads, turns)


def _run(
    workload: dict[str, Any],
    keep_in: str,
    threads: int,
    loads: list[int],
    steps: Callable[[BuiltWorkload, int], Generator[None, Any, Any]],
) -> Any:
    """Run `steps`, given what was built and the batch size of a script's loader (0 without one).

    Args:
        loads: that size, what it shall be, and the samples of a step then; empty to leave it.
    """
    # Where the machine's memory ends before our limit, let the kernel end this process, no other.
    # Source: Documentation/filesystems/proc.rst, oom_score_adj.
    with contextlib.suppress(OSError):
        _OOM_SCORE.write_text(_FIRST_TO_DIE)
    loaders = None
    # A function's batch is made at once.
    if workload_of(workload).function is None:
        loaders = Loaders(*loads[:2])
        loaders.install()

    def program(built: BuiltWorkload) -> Generator[None, Any, Any]:
        import torch

        if threads:
            torch.set_num_threads(threads)
        if loads and built.samples != loads[2]:
            raise _TooFewError(
                f"the script's data does not make a step of {loads[2]} samples: "
                f"it gave {built.samples}"
            )
        return (yield from steps(built, loaders.size if loaders else 0))

    return run_program(workload, keep_in, program)


def _enough(least: dict[int, Least], passed_s: float, budget_s: float) -> bool:
    """Whether the sizes had turns enough: they are settled, or one more would be too late."""
    turns = min(one.turns for one in least.values())
    if turns < _FEWEST_TURNS:
        return False
    settled = all(one.spread <= _SETTLED for one in least.values())
    return settled or passed_s * (1 + 1 / turns) > budget_s


def _turn(segments: Segments) -> Generator[None, Any, list[Any]]:
    """The parts of a few steps, at least two and not many for long ones."""
    steps: list[Any] = []
    began = time.monotonic()
    while len(steps) < 2 or (
        time.monotonic() - began < _TURN_S and len(steps) < _MOST_STEPS_A_TURN
    ):
        segments.begin()
        yield
        steps.append(segments.end())
    return steps


def _clock(place: Place | None) -> Callable[[], int]:
    """CPU time where all work is this process's one thread's; else the wall clock."""
    import torch

    if place is None and torch.get_num_threads() == 1:
        return time.process_time_ns

    def wall() -> int:
        if place is not None:
            place.synchronise()
        return time.perf_counter_ns()

    return wall


def _facts(built: BuiltWorkload, place: Place | None) -> dict[str, Any]:
    import torch

    rows = built.rows
    resizes = built.reads_batch and bool(rows) and built.samples % rows == 0
    device_bytes = 0
    if place is not None:
        device_bytes = torch.cuda.get_device_properties(place.index).total_memory
    return {
        "samples": built.samples,
        "quantum": built.samples // rows if resizes else 1,
        "resizes": resizes,
        "clock": "cpu" if _clock(place) is time.process_time_ns else "wall",
        "device": place.device if place is not None else "cpu",
        "device_bytes": device_bytes,
    }


def _process_bytes(place: Place | None) -> tuple[int, int]:
    """The most private memory so far, and what of the address space is not private.

    Linux keeps the peak of the whole address space; what is mapped of files and libraries hardly
    changes once they are loaded, so that the difference is the peak of private memory.
    """
    import torch

    if place is not None:
        return int(torch.cuda.max_memory_reserved(place.index)), 0
    size, private = read_status_bytes("VmSize"), read_status_bytes("VmData")
    return read_status_bytes("VmPeak") - size + private, size - private


def _tensor_bytes(
    built: BuiltWorkload, place: Place | None
) -> Generator[None, Any, tuple[int, int]]:
    """The most that tensors take at once in a step, and in its update, as the allocator tells."""
    import torch

    if place is not None:
        torch.cuda.reset_peak_memory_stats(place.index)
        yield
        place.synchronise()
        return int(torch.cuda.max_memory_allocated(place.index)), 0
    with ClosureWatch():
        _, record = yield from record_memory(built)
    if record is None:
        return 0, 0
    spans = list(zip(record.start_ns.tolist(), record.end_ns.tolist(), record.names, strict=True))
    # A closure of the update runs the forward and backward pass.
    closed = max((end for _, end, name in spans if name == CLOSURE_RANGE), default=0)
    updates = [max(begin, closed) for begin, _, name in spans if name.startswith(_UPDATE)]
    level = most = sum(nbytes for nbytes, _ in record.before.values())
    updating = 0
    for time_ns, _, change in record.changes:
        if updates and time_ns >= updates[0]:
            updating = max(updating, level, level + change)
        level += change
        most = max(most, level)
    return most, updating
