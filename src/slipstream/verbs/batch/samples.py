"""Measure a step at several batch sizes, each in a separate process.

A size that does not fit ends its process or raises in its step, and is reported as such; the caller
is unaffected. Memory is read in a process that ran no other size, since an allocator keeps what a
larger batch needed. Time is measured in one process that alternates between the sizes, so that a
machine that slows down affects all of them.
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
from slipstream.verbs.batch.segments import MinimumTime, Segments
from slipstream.verbs.children import run_program, workload_of
from slipstream.workload import BuiltWorkload, Workload, file_backups
from slipstream.workload.loaders import Loaders
from slipstream.workload.script import ScriptEndedError

ARGUMENT = "batch_size"
"""The function argument that sets the batch if the step hides it."""
_MODULE = "slipstream.verbs.batch.samples"
# Optimizers create their state in the first step and use it in the second.
_WARMUP_STEPS = 3
# The name that torch annotates an update with.
_UPDATE = "Optimizer.step#"
_TURN_S = 0.1
_MAX_STEPS_PER_TURN = 10
_MIN_TURNS = 4
_MAX_SPREAD = 0.01
_NO_MEMORY = (
    "can't allocate memory", "out of memory", "not enough memory", "bad_alloc", "MemoryError",
    "Cannot allocate memory", "could not create a", "std::length_error",
)  # fmt: skip
_OOM_SCORE, _KILL_FIRST = Path("/proc/self/oom_score_adj"), "1000"
_NO_LOADER = (
    "a script's batch is that of the DataLoader it trains with, and this script has none with a "
    f"batch size; pass a function with an argument {ARGUMENT}: train.py:make_workload"
)


@dataclass(frozen=True)
class BatchSample:
    """Measurement at one batch size.

    Attributes:
        samples: per step.
        step_ns: minimum time of a step; a rough value before it is `timed`.
        spread: relative repeatability error of that time; infinite before it is `timed`.
        tensor_bytes: peak memory of all tensors; 0 if it was not recorded.
        update_bytes: the peak during the optimizer's update, which hardly depends on the batch; 0
            if it cannot be separated.
        process_bytes: peak private memory of the process, or memory that torch reserved on the
            device; a memory limit counts it.
    """

    samples: int
    step_ns: float
    spread: float
    tensor_bytes: int
    update_bytes: int
    process_bytes: int

    def timed(self, timing: Timing) -> BatchSample:
        return replace(self, step_ns=timing.step_ns, spread=timing.spread)


@dataclass(frozen=True)
class Timing:
    """Minimum time of a step of one size; `spread` is the relative difference between turns."""

    samples: int
    step_ns: float
    spread: float


@dataclass(frozen=True)
class Facts:
    """Properties of a workload, found by the first process.

    Attributes:
        samples: per step, in the current batch.
        quantum: sizes must be multiples of it.
        resizes: whether the batch can be cut or repeated; otherwise the function's argument
            ``batch_size`` sets it, or a script's loader.
        clock: "cpu" or "wall".
        device: "cpu" or "cuda".
        device_bytes: memory of the device; 0 for a CPU.
        loader: batch size of the DataLoader that a script trains with; 0 for a function.
        mapped_bytes: address space that is not private memory, such as libraries.
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
    """A step of this size does not fit into memory, or the data has too few samples."""


class _TooFewError(WorkloadError):
    """A script's data has fewer samples than requested."""


class Sampler:
    """Context that runs steps of one workload at requested sizes in child processes.

    Args:
        limit_bytes: private memory above which a step counts as not fitting; None for no limit.
        timeout_s: a process is stopped after this many seconds of silence.
        report: called with a short line before slow parts.
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
        """Run the workload at its own size, which determines `facts`.

        Raises:
            WorkloadError: the user's code failed, or its batch cannot be set.
            DoesNotFitError: this size does not fit.
        """
        self._report("the current batch")
        answer = self._call(0, "run_once", samples=0)
        facts = Facts(**answer["facts"])
        if not facts.resizes:
            # A script's step has as many samples as its loader yields, or a multiple of them.
            whole = facts.loader and facts.samples % facts.loader == 0
            quantum = facts.samples // facts.loader if whole else 0
            facts = replace(facts, quantum=quantum) if quantum else self._by_argument(facts)
        self.facts = facts
        return BatchSample(facts.samples, **answer["sample"])

    def sample(self, samples: int) -> BatchSample:
        """Run a step of this many samples in a fresh process."""
        self._report(f"{samples} samples")
        assert self.facts is not None
        size = samples if self.facts.resizes else 0
        answer = self._call(samples, "run_once", samples=size)
        return BatchSample(samples, **answer["sample"])

    def needs(self, samples: int, processes: int = 3) -> list[int]:
        """Return the private memory of several processes that only run steps of this many samples.

        Empty if one of them does not fit. Fragmentation varies by some percent between processes,
        and forks inherit their parent's, so each is started separately.
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
        """Return the minimum time of a step at each of `sizes`, measured alternately."""
        self._report(f"timing {len(sizes)} sizes alternately")
        rows = self._call(max(sizes), "take_turns", sizes=list(sizes), budget_s=budget_s)
        return [Timing(*row) for row in rows]

    def alone(self, samples: int, budget_s: float) -> Timing:
        """Return the minimum time of a step in a process that runs no other size.

        Args:
            samples: size for the function (see `Facts.resizes`); 0 for the current batch.
        """
        self._report(f"timing {samples} samples")
        rows = self._call(samples, "take_turns", sizes=[], budget_s=budget_s)
        ((_, step_ns, spread),) = rows
        return Timing(samples, step_ns, spread)

    def _sized(self, samples: int) -> Workload:
        """Return the workload with its batch argument set, if its step hides the batch."""
        facts = self.facts
        if not samples or facts is None or facts.resizes or facts.loader:
            return self._workload
        arguments = {**self._workload.arguments, ARGUMENT: samples}
        return replace(self._workload, arguments=arguments)

    def _loads(self, samples: int) -> list[int]:
        facts = self.facts
        if not samples or facts is None or not facts.loader:
            return []
        return [facts.loader, samples // facts.quantum, samples]

    def _by_argument(self, facts: Facts) -> Facts:
        from slipstream.workload.built import HIDDEN_BATCH

        size = self._workload.arguments.get(ARGUMENT, facts.samples or self._default())
        if self._workload.function is None or not isinstance(size, int) or size < 1:
            raise WorkloadError(
                "this step's batch size cannot be set",
                where=self._workload.name,
                remedy=_NO_LOADER
                if self._workload.function is None
                else f"{HIDDEN_BATCH}, or one with an argument {ARGUMENT} "
                f"(given as --set {ARGUMENT}=N)",
            )
        return replace(facts, samples=size, quantum=1)

    def _default(self) -> Any:
        """Return the default of the function's batch argument, from its source; 0 without one."""
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
        """Call a function of this module in a separate process at `shown` samples (0: current)."""
        workload = self._sized(shown)
        called = f"{_MODULE}:{function}"
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
                no_data = shown and isinstance(error, ScriptEndedError)
                if no_data or isinstance(error, _TooFewError):
                    remedy = "use smaller sizes or more data"
                    raise DoesNotFitError(error.what, remedy=remedy) from error
                if not _is_memory(error):
                    raise
                what = f"{shown} samples" if shown else "the current batch"
                limit = self._limit_bytes
                raise DoesNotFitError(
                    f"a step of {what} does not fit into "
                    + ("memory" if limit is None else format_bytes(limit)),
                    remedy="use a smaller batch, or a larger --limit",
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
        """Return a process with the imports done that never ran a step, to fork from."""
        if self._child is None:
            self._child = self._start()
            self._child.call(f"{_MODULE}:warm_up", timeout_s=self._timeout_s)
        return self._child

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *error: object) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def _is_memory(error: SlipstreamError) -> bool:
    if isinstance(error, ChildDiedError):
        return True
    # Messages of torch and the libraries below it.
    return any(words in error.what for words in _NO_MEMORY)


# The functions below run in a child, mostly in forks of the one that ran `warm_up`.


def warm_up() -> None:
    """Import what a step needs. Computes nothing, since threads do not survive a fork."""
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
    """Measure a few steps of `samples` (0: the workload's size)."""

    def steps(built: BuiltWorkload, loader: int) -> Generator[None, Any, dict[str, Any]]:
        if samples:
            built.resize(samples)
        place = find_device(built)
        for _ in range(_WARMUP_STEPS - 1):
            yield
        clock = _clock(place)
        began = clock()
        yield
        step_ns = clock() - began
        process, mapped = _process_bytes(place)
        peak_bytes, update_bytes = (yield from _tensor_bytes(built, place)) if watch else (0, 0)
        return {
            "sample": {
                "step_ns": step_ns, "spread": math.inf, "tensor_bytes": peak_bytes,
                "update_bytes": update_bytes, "process_bytes": process,
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
    """Return ``[samples, ns, spread]`` of each size, alternating until the minima are stable.

    Without sizes, measures the current batch. The process keeps its pages: whether a step has page
    faults varies between sizes and launches, and does not follow a line.
    """

    def turns(built: BuiltWorkload, loader: int) -> Generator[None, Any, list[list[float]]]:
        heap.keep_pages()
        yield
        minima = {size: MinimumTime() for size in sizes or [0]}
        began = time.monotonic()
        with Segments(built, _clock(find_device(built))) as segments:
            while not _enough(minima, time.monotonic() - began, budget_s):
                for size, minimum in minima.items():
                    if size:
                        built.resize(size)
                    # A warm-up step, since caches and heap are in the state of the previous size.
                    yield
                    gc.collect()
                    minimum.turn((yield from _turn(segments)))
        return [[size, minimum.step_ns, minimum.spread] for size, minimum in minima.items()]

    return _run(workload, keep_in, threads, loads, turns)


def _run(
    workload: dict[str, Any],
    keep_in: str,
    threads: int,
    loads: list[int],
    steps: Callable[[BuiltWorkload, int], Generator[None, Any, Any]],
) -> Any:
    """Run `steps` with the built workload and the batch size of a script's loader (0 without one).

    Args:
        loads: the loader's batch size, the new one, and the resulting samples per step; empty to
            leave it unchanged.
    """
    # If the machine runs out of memory before the limit, let the kernel kill this process first.
    # Source: Documentation/filesystems/proc.rst, oom_score_adj.
    with contextlib.suppress(OSError):
        _OOM_SCORE.write_text(_KILL_FIRST)
    loaders = None
    # A function's batch is built before any step.
    if workload_of(workload).function is None:
        loaders = Loaders(*loads[:2])
        loaders.install()

    def program(built: BuiltWorkload) -> Generator[None, Any, Any]:
        import torch

        if threads:
            torch.set_num_threads(threads)
        if loads and built.samples != loads[2]:
            raise _TooFewError(
                f"the script's data does not yield a step of {loads[2]} samples: "
                f"it gave {built.samples}"
            )
        return (yield from steps(built, loaders.size if loaders else 0))

    return run_program(workload, keep_in, program)


def _enough(minima: dict[int, MinimumTime], passed_s: float, budget_s: float) -> bool:
    """Whether timing can end: the minima are stable, or another turn would exceed the budget."""
    turns = min(minimum.turns for minimum in minima.values())
    if turns < _MIN_TURNS:
        return False
    settled = all(minimum.spread <= _MAX_SPREAD for minimum in minima.values())
    return settled or passed_s * (1 + 1 / turns) > budget_s


def _turn(segments: Segments) -> Generator[None, Any, list[Any]]:
    """Return the parts of a turn's steps: at least two steps, and few slow ones."""
    steps: list[Any] = []
    began = time.monotonic()
    while len(steps) < 2 or (
        time.monotonic() - began < _TURN_S and len(steps) < _MAX_STEPS_PER_TURN
    ):
        segments.begin()
        yield
        steps.append(segments.end())
    return steps


def _clock(place: Place | None) -> Callable[[], int]:
    """Return the CPU clock if all work is on this process's one thread; else the wall clock."""
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
    """Return the peak of private memory, and the address space that is not private, in bytes.

    Linux keeps the peak of the whole address space. Mapped files and libraries hardly change once
    loaded, so the difference is the peak of private memory.
    """
    import torch

    if place is not None:
        return int(torch.cuda.max_memory_reserved(place.index)), 0
    size, private = read_status_bytes("VmSize"), read_status_bytes("VmData")
    return read_status_bytes("VmPeak") - size + private, size - private


def _tensor_bytes(
    built: BuiltWorkload, place: Place | None
) -> Generator[None, Any, tuple[int, int]]:
    """Return the peak bytes of tensors in a step and in its update, by the allocator's events."""
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
    level = peak_bytes = sum(nbytes for nbytes, _ in record.before.values())
    update_bytes = 0
    for time_ns, _, change in record.changes:
        if updates and time_ns >= updates[0]:
            update_bytes = max(update_bytes, level, level + change)
        level += change
        peak_bytes = max(peak_bytes, level)
    return peak_bytes, update_bytes
