"""Time single operator calls with the recorded strides and random data. Runs in a child process.

Each call gets several sets of inputs, used in turn, so that an operator finds its inputs as far
away as in a real step, not hot from the last repetition; one that is asked for warm has a single
set. All calls of a batch are timed round by
round; each keeps its minimum. On one thread CPU time is taken: other programs do not add to it.
Where one thread is compared with several, both are timed by the wall clock. There other programs
do add: an operator on two threads whose cores are taken waits for them in every repetition, a
hundred times as long as it runs, and all repetitions agree. So the kernel is asked how long our
threads waited for a core, and what they waited is part of the spread.

Besides operators there are four calls that are not in torch's schema:
``slipstream::optimizer_step``, a whole ``optimizer.step()`` over parameters of given shapes, Python
and all; ``slipstream::take_batch``, what the main process does to get a batch of tensors of
given shapes from a worker of a ``DataLoader`` that has it ready; ``slipstream::in_mode``, an
operator called with autograd, without, or in inference mode; and ``slipstream::module_pass``, the
forward or backward pass of a module, Python and all.
A technique adds calls of its own, ``slipstream::NAME``, by an entry point NAME in the group
``slipstream.timers``: a function from the `Call` to what is to be timed; and an operator of
torch's library by one in ``slipstream.operators``: the module that registers it. A function of the
same name in ``slipstream.timers_together`` is given a batch's calls first: to compile them in one
go. Only what is installed can be named so, whatever a graph holds.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from slipstream.durations.recomputation import CHECKPOINT, checkpoint_overhead
from slipstream.graph.call import ITEM_BYTES, SCALAR_TYPE, Call, TensorSpec
from slipstream.heap import keep_pages

OPTIMIZER_STEP = "slipstream::optimizer_step"
TAKE_BATCH = "slipstream::take_batch"
IN_MODE = "slipstream::in_mode"
MODULE_PASS = "slipstream::module_pass"
TIMERS = "slipstream.timers"
TOGETHER = "slipstream.timers_together"
OPERATORS = "slipstream.operators"
_ROUNDS, _FEW_ROUNDS = 15, 4
# What takes long in a round is disturbed less, for its length; it takes part in fewer. That rounds
# agree is no reason for fewer: all of them may have had the same neighbour. Seconds, by rounds.
_ENOUGH_S = {5: 0.15, 3: 0.6}
# What a first run makes for later ones is little beside so long a call: one run tells its length.
_LONG_NS = 50e6
_SAMPLE_NS = 2e6
_BATCH_BUDGET_S = 20.0
# Beyond the second-level cache of the processors this runs on, and small enough to allocate fast.
_ROTATED_BYTES = 32 << 20
_MOST_SETS = 16
_PAGE_BYTES = 4096
_MOST_WAITED = 0.99
_WORK = "slipstream work "
# Its kernel makes what the backward pass reads only while gradients are recorded.
_ASKS_THE_MODE = ("aten::mkldnn_rnn_layer",)


def run(
    calls: Sequence[Any],
    threads: int | Sequence[int],
    wall: Sequence[bool] = (),
    warm: Sequence[bool] = (),
    roughly: bool = False,
) -> list[dict[str, Any]]:
    """For each call (JSON of `Call.to_json`) how long it takes, or ``{"error"}``.

    ``nanoseconds``, ``spread``, ``workspace`` and ``made`` are those of an `Answer`; ``waited`` is
    the share of that time in which threads may have waited for a core, 0 where CPU time is taken.

    Args:
        threads: intra-op threads, of all or of each; 0 for what torch chooses.
        wall: of each, whether to take the wall clock on one thread too.
        warm: of each, whether its operands are to be in the caches already.
        roughly: whether a few rounds will do.
    """
    import torch

    # A captured step's page faults are a task of their own; one call repeated alone would give
    # its memory back and fault it in again every time.
    keep_pages()
    torch.manual_seed(0)
    default = torch.get_num_threads()
    counts = [threads] * len(calls) if isinstance(threads, int) else list(threads)
    counts = [count or default for count in counts]
    clocks = [
        time.thread_time_ns if count == 1 and not by_wall else time.perf_counter_ns
        for count, by_wall in zip(counts, wall or [False] * len(calls), strict=True)
    ]
    _make_ready(calls)
    results: list[dict[str, Any]] = []
    timers: list[_Timer | None] = []
    # With each sample the share of it that was waited.
    samples: list[list[tuple[float, float]]] = [[] for _ in calls]
    # An in-place operator repeated often enough would shrink its numbers into the slow range.
    torch.set_flush_denormal(True)
    try:
        with torch.no_grad():
            near = warm or [False] * len(calls)
            for value, count, clock, hot in zip(calls, counts, clocks, near, strict=True):
                torch.set_num_threads(count)
                try:
                    timers.append(_timer(Call.from_json(value), clock, hot))
                    results.append({})
                except Exception as error:
                    timers.append(None)
                    results.append({"error": f"{type(error).__name__}: {error}"[:300]})
            needs = _needs([None if timer is None else timer.once for timer in timers])
            began = time.monotonic()
            spent_s = [0.0] * len(timers)
            for round_ in range(_FEW_ROUNDS if roughly else _ROUNDS):
                for i, timer in enumerate(timers):
                    enough = any(round_ >= n and spent_s[i] > s for n, s in _ENOUGH_S.items())
                    if timer is not None and not enough:
                        torch.set_num_threads(counts[i])
                        by_wall = clocks[i] is time.perf_counter_ns
                        sample, begin = timer.sample, time.monotonic()
                        samples[i].append(_with_waiting(sample) if by_wall else (sample(), 0.0))
                        spent_s[i] += time.monotonic() - begin
                if round_ >= 2 and time.monotonic() - began > _BATCH_BUDGET_S:
                    break
    finally:
        torch.set_flush_denormal(False)
    for i, taken in enumerate(samples):
        if taken:
            ordered = sorted(taken)
            middle = ordered[len(ordered) // 2]
            quarter = len(ordered) // 4
            spread = (ordered[-1 - quarter][0] - ordered[quarter][0]) / 2 / max(middle[0], 1e-9)
            # The least of differences would be the one with the most noise in what is taken off.
            difference = str(calls[i][0]).startswith(CHECKPOINT)
            nanoseconds, waited = middle if difference else ordered[0]
            # Undisturbed it would have taken somewhere from what was not waited to all of it.
            spread = math.hypot(spread, math.log1p(-waited))
            results[i] = {"nanoseconds": nanoseconds, "spread": spread, "waited": waited} | needs[i]
    return results


def _with_waiting(timer: Callable[[], float]) -> tuple[float, float]:
    """What `timer` returns, and for which share of it threads of ours waited for a core."""
    waited, began = waited_ns(), time.perf_counter_ns()
    sample = timer()
    took = time.perf_counter_ns() - began
    # Of a thread that ended meanwhile nothing is known any more.
    return sample, min(max(waited_ns() - waited, 0) / took, _MOST_WAITED)


def waited_ns() -> int:
    """How long all threads of this process were ready to run and had no core; 0 if unknown.

    Source: the second number of ``/proc/PID/task/TID/schedstat`` (Linux).
    """
    total = 0
    for path in glob.iglob("/proc/self/task/*/schedstat"):
        # A thread may end meanwhile.
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int(Path(path).read_text().split()[1])
    return total


@dataclass(frozen=True)
class _Timer:
    """How one call is timed.

    Attributes:
        sample: runs it for about two milliseconds and returns ns per call.
        once: runs it once and returns what it makes; None for what is no operator of a step.
    """

    sample: Callable[[], float]
    once: Callable[[], object] | None = None


def _needs(works: Sequence[Callable[[], object] | None]) -> list[dict[str, Any]]:
    """Of each work its ``workspace`` and ``made``, as an `Answer` has them; {} for None."""
    import torch
    from torch._C._profiler import _EventType
    from torch.utils._pytree import tree_leaves

    needs: list[dict[str, Any]] = [{} for _ in works]
    if not any(works):
        return needs
    activities = [torch.profiler.ProfilerActivity.CPU]
    # One for all: starting and stopping it takes longer than most operators.
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        for i, work in enumerate(works):
            if work is not None:
                with torch.profiler.record_function(f"{_WORK}{i}"):
                    outputs = tree_leaves(work())
                tensors = [one for one in outputs if isinstance(one, torch.Tensor)]
                needs[i]["made"] = [one.untyped_storage().nbytes() for one in tensors]
                del outputs, tensors
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        if not event.name.startswith(_WORK):
            stack.extend(event.children)
            continue
        inside, changes = [event], []
        while inside:
            one = inside.pop()
            inside.extend(one.children)
            if one.tag == _EventType.Allocation and one.extra_fields.device.type == "cpu":
                changes.append((one.start_time_ns, one.extra_fields.alloc_size))
        levels = list(itertools.accumulate((size for _, size in sorted(changes)), initial=0))
        needs[int(event.name.removeprefix(_WORK))]["workspace"] = max(levels) - levels[-1]
    return needs


def _timer(call: Call, clock: Callable[[], int], warm: bool = False) -> _Timer:
    """How `call` is timed."""
    import torch

    if call.op.startswith(TAKE_BATCH):
        return _Timer(_take_batch(call))
    if call.op.startswith(IN_MODE):
        return _in_mode(call, clock)
    if call.op.startswith(CHECKPOINT):
        return _Timer(checkpoint_overhead(call.arguments[0], clock))
    if (make := _registered(call.name)) is not None:
        return _Timer(_repeated(make(call), clock))
    mode = torch.enable_grad if call.name in _ASKS_THE_MODE else contextlib.nullcontext
    return _operator_timer(call, clock, mode=mode, most_sets=1 if warm else _MOST_SETS)


def _registered(name: str) -> Callable[[Call], Callable[[], object]] | None:
    """What an installed package times under this name; None where nobody does."""
    namespace, _, short = name.partition("::")
    if namespace != "slipstream":
        return None
    for point in entry_points(group=TIMERS, name=short):
        timer: Callable[[Call], Callable[[], object]] = point.load()
        return timer
    return None


def _make_ready(calls: Sequence[Any]) -> None:
    """Give the calls of each timer to what makes them ready together, where it has such a one.

    What goes wrong there is left to each call's own timer, which tells it apart.
    """
    for point in entry_points(group=TOGETHER):
        alike = [one for one in calls if str(one[0]).startswith(f"slipstream::{point.name}(")]
        if len(alike) > 1:
            with contextlib.suppress(Exception):
                point.load()([Call.from_json(one) for one in alike])


def _repeated(work: Callable[[], object], clock: Callable[[], int]) -> Callable[[], float]:
    work()
    start = clock()
    work()
    repeats = max(1, round(_SAMPLE_NS / max(clock() - start, 200)))

    def sample() -> float:
        begin = clock()
        for _ in range(repeats):
            work()
        return (clock() - begin) / repeats

    return sample


def _operator_timer(
    call: Call,
    clock: Callable[[], int],
    prepare: Callable[[Any], Any] = lambda made: made,
    mode: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    most_sets: int = _MOST_SETS,
) -> _Timer:
    """A timer of an operator that runs in `mode`; `prepare` is given every set of inputs."""
    operator, positional, named = _resolve(call)
    size = sum(spec.nbytes for spec in call.inputs) + sum(spec.nbytes for spec in call.outputs)

    def given() -> Any:
        keyed = {name: make() for name, make in named.items()}
        return prepare((tuple(make() for make in positional), keyed))

    arguments, keywords = given()
    with mode():
        for _ in range(2):
            start = clock()
            operator(*arguments, **keywords)
            took = max(clock() - start, 200)
            if took > _LONG_NS:
                break
    repeats = max(1, round(_SAMPLE_NS / took))
    # No more than are used: making them takes longer than most operators.
    sets = max(1, min(most_sets, _ROTATED_BYTES // max(size, 1), repeats))
    inputs = [(arguments, keywords), *(given() for _ in range(sets - 1))]
    schedule = [inputs[i % sets] for i in range(repeats)]

    def sample() -> float:
        with mode():
            begin = clock()
            for args, kwargs in schedule:
                operator(*args, **kwargs)
            return (clock() - begin) / repeats

    def once() -> object:
        with mode():
            return operator(*arguments, **keywords)

    return _Timer(sample, once)


def _resolve(
    call: Call,
) -> tuple[Any, list[Callable[[], Any]], dict[str, Callable[[], Any]]]:
    """The operator, and makers of its positional and keyword-only arguments."""
    import torch

    if call.op.startswith(OPTIMIZER_STEP):
        return (lambda optimizer: optimizer.step()), [lambda: _optimizer(call)], {}
    if call.op.startswith(MODULE_PASS):
        return (lambda run: run()), [lambda: _module_pass(call)], {}
    schema = torch._C.parse_schema(call.op)
    namespace, _, name = schema.name.partition("::")
    if namespace == "slipstream":
        for point in entry_points(group=OPERATORS, name=name):
            point.load()  # which registers it
    operator = getattr(getattr(torch.ops, namespace), name)
    operator = getattr(operator, schema.overload_name or "default")
    bound = _index_bound(call)
    positional: list[Callable[[], Any]] = []
    named: dict[str, Callable[[], Any]] = {}
    for parameter, value in zip(schema.arguments, call.arguments, strict=False):
        make = _maker(value, str(parameter.real_type), bound)
        if parameter.kwarg_only:
            named[parameter.name] = make
        else:
            positional.append(make)
    return operator, positional, named


def _optimizer(call: Call) -> Any:
    """An optimizer as described, with gradients, past the step that makes its state.

    Gradients have as many zeros as the recorded ones, in one piece, as rows that nobody used.
    """
    import torch

    kind, settings, specs = call.arguments
    parameters = [torch.nn.Parameter(random_tensor(spec).clone()) for spec in specs]
    zeros = dict(settings).get("zeros", (0.0,) * len(parameters))
    for parameter, share in zip(parameters, zeros, strict=True):
        gradient = torch.full_like(parameter, 1e-3)
        gradient.view(-1)[: round(share * parameter.numel())] = 0
        parameter.grad = gradient
    make = getattr(torch.optim, kind)
    accepted = inspect.signature(make).parameters
    options = {name: value for name, value in settings if name in accepted}
    optimizer = make(parameters, **options)
    optimizer.step()
    return optimizer


def _module_pass(call: Call) -> Callable[[], Any]:
    """One pass of a module.

    The call's arguments are the class (``package.module:Class``), its settings as pairs, the input,
    and whether to time the backward pass. A module that is given integers looks them up in a table
    of its ``num_embeddings`` rows; its backward pass goes to its parameters.
    """
    import torch

    path, settings, spec, backward = call.arguments
    home, _, name = path.partition(":")
    module = getattr(importlib.import_module(home), name)(**dict(settings))
    given = random_tensor(spec, getattr(module, "num_embeddings", 1))
    floating = given.is_floating_point()
    sources = [given.requires_grad_()] if floating else list(module.parameters())

    def forward() -> Any:
        with torch.enable_grad():
            return module(given)

    if not backward:
        return forward
    output = forward()
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, sources, gradient, retain_graph=True)


def _in_mode(call: Call, clock: Callable[[], int]) -> _Timer:
    """Time an operator in a mode of autograd.

    The call's arguments are the mode (``grad``, ``no_grad``, ``inference``), the operator, its
    arguments, and what each of its tensors is: a ``parameter``, an ``activation`` that parameters
    have gone into, or ``other``.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    mode, operator, arguments, roles = call.arguments
    inner = Call(operator, arguments, call.outputs)
    modes: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }
    enter = modes[mode]

    def prepare(made: Any) -> Any:
        left = iter(roles)

        def as_in_step(tensor: Any) -> Any:
            role = next(left)
            if mode == "inference" and role == "activation":
                with enter():
                    return tensor.clone(memory_format=torch.preserve_format)
            traced = role != "other" and tensor.is_floating_point()
            return tensor.requires_grad_() if mode == "grad" and traced else tensor

        return tree_map_only(torch.Tensor, as_in_step, made)

    return _operator_timer(inner, clock, prepare, enter)


def _take_batch(call: Call) -> Callable[[], float]:
    """Take one batch from a worker that has it ready; returns the ns of CPU time it takes.

    On any number of threads CPU time is taken: what is spent waiting for the worker is not in it.
    """
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Batches(IterableDataset[list[Any]]):
        """The same tensors again and again; collated nowhere, copied to shared memory by torch."""

        def __iter__(self) -> Iterator[list[Any]]:
            while True:
                yield [random_tensor(spec) for spec in call.arguments]

    batches = iter(DataLoader(Batches(), batch_size=None, num_workers=1))

    def sample() -> float:
        begin = time.thread_time_ns()
        batch = next(batches)
        for tensor in batch:
            # The first touch of each page of shared memory costs too.
            torch.sum(tensor.reshape(-1)[:: max(1, _PAGE_BYTES // tensor.element_size())])
        return float(time.thread_time_ns() - begin)

    sample()
    return sample


def _maker(value: Any, kind: str, bound: int) -> Callable[[], Any]:
    import torch

    if isinstance(value, TensorSpec):
        return lambda: random_tensor(value, bound)
    if isinstance(value, (list, tuple)):
        makers = [_maker(item, "", bound) for item in value]
        return lambda: [make() for make in makers]
    if "ScalarType" in kind and isinstance(value, int):
        dtype = next(name for name, code in SCALAR_TYPE.items() if code == value)
        scalar_type = getattr(torch, dtype)
        return lambda: scalar_type
    if "Layout" in kind and isinstance(value, int):
        return lambda: torch.strided
    if "MemoryFormat" in kind and isinstance(value, int):
        formats = {
            0: torch.contiguous_format,
            1: torch.preserve_format,
            2: torch.channels_last,
            3: torch.channels_last_3d,
        }
        return lambda: formats[value]
    return lambda: value


def random_tensor(spec: TensorSpec, bound: int = 1) -> Any:
    """A tensor with `spec`'s dtype, shape and strides; integers lie in [0, bound)."""
    import torch

    dtype = getattr(torch, spec.dtype)
    extent = 0
    if spec.numel:
        extent = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True))
    if dtype.is_floating_point or dtype.is_complex:
        base = _random_numbers(extent).to(dtype, copy=True)
    elif dtype is torch.bool:
        base = torch.rand(extent) < 0.5
    else:
        limit = min(max(bound, 1), 2 ** (8 * ITEM_BYTES[spec.dtype] - 1))
        base = torch.randint(0, limit, (extent,), dtype=dtype)
    return torch.as_strided(base, spec.shape, spec.strides)


_kept_numbers: list[Any] = []


def _random_numbers(count: int) -> Any:
    """float32 [count], to be copied: making them takes ten times as long as copying them.

    Positive and away from zero: no denormals, no domain errors in sqrt, log or division.
    """
    import torch

    if not _kept_numbers or len(_kept_numbers[0]) < count:
        _kept_numbers[:] = [torch.rand(count, dtype=torch.float32).mul_(0.1).add_(0.01)]
    return _kept_numbers[0][:count]


def _index_bound(call: Call) -> int:
    """Below which value integer tensors of `call` are valid indices; 1 where we cannot tell."""
    first = call.inputs[0] if call.inputs else None
    if call.name == "aten::embedding" and first is not None:
        return first.shape[0]
    if call.name == "aten::embedding_dense_backward":
        return int(call.arguments[2])
    if call.name.startswith("aten::nll_loss"):
        logits = [spec for spec in call.inputs if spec.dtype.startswith(("float", "bfloat"))]
        return max((spec.shape[1] for spec in logits if len(spec.shape) >= 2), default=1)
    if call.name in ("aten::index_select", "aten::gather") and first is not None and first.shape:
        dim = int(call.arguments[1])
        return first.shape[dim]
    if call.name == "aten::_embedding_bag" and first is not None:
        return first.shape[0]
    return 1
