"""Time single operator calls with the recorded strides and random data. Runs in a child process.

Each call rotates through several sets of inputs, so that an operator finds them as far away as in a
real step, not in the cache from the last repetition; a warm call has a single set. The calls of a
batch are timed round by round, and each keeps its minimum. One thread is timed by CPU time, which
excludes other programs. Several threads, and one that is compared with several, are timed by the
wall clock, which includes them: an operator on two threads whose cores are busy waits for them in
every repetition, up to a hundred times its own duration. The time that our threads waited for a
core, as counted by the kernel, is therefore part of the spread.

Four calls are not operators of torch:

- ``slipstream::optimizer_step``: a whole ``optimizer.step()`` over parameters of given shapes;
- ``slipstream::take_batch``: the main process's work to take a batch from a ready worker of a
  ``DataLoader``;
- ``slipstream::in_mode``: an operator with autograd, without, or in inference mode;
- ``slipstream::module_pass``: the forward or backward pass of a module.

A technique adds its own call ``slipstream::NAME`` by an entry point NAME in the group
``slipstream.timers``, a function from a `Call` to the function to time. An entry point in
``slipstream.operators`` is the module that registers a torch operator. One in
``slipstream.timers_together`` is called first with all such calls of a batch, for instance to
compile them together. A graph can only name installed entry points.
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
# Long calls are disturbed less and take part in fewer rounds: total seconds after which a call is
# done, by number of rounds. Agreement between rounds is no reason to stop, since another program
# may have disturbed all of them.
_ENOUGH_S = {5: 0.15, 3: 0.6}
# For longer calls the set-up of a first run is negligible, so one run suffices to estimate them.
_LONG_NS = 50e6
_SAMPLE_NS = 2e6
_BATCH_BUDGET_S = 20.0
# Larger than the second-level caches of current processors, and small enough to allocate quickly.
_ROTATED_BYTES = 32 << 20
_MAX_SETS = 16
_PAGE_BYTES = 4096
_MAX_WAITED = 0.99
_WORK = "slipstream work "
# Kernels that create the inputs of the backward pass only while gradients are recorded.
_DEPENDS_ON_MODE = ("aten::mkldnn_rnn_layer",)


def run(
    calls: Sequence[Any],
    threads: int | Sequence[int],
    wall: Sequence[bool] = (),
    warm: Sequence[bool] = (),
    roughly: bool = False,
) -> list[dict[str, Any]]:
    """Time the calls, given as JSON by `Call.to_json`; return a result per call.

    A result has ``nanoseconds``, ``spread``, ``workspace`` and ``made`` of an `Answer`, and
    ``waited``, the share of time in which threads may have waited for a core (0 for CPU time); or
    ``error``.

    Args:
        threads: intra-op threads of all calls or of each; 0 for torch's default.
        wall: per call, whether to use the wall clock on one thread too.
        warm: per call, whether its operands are in the caches.
        roughly: whether a few rounds suffice.
    """
    import torch

    # Page faults are separate tasks of a recorded step; a call repeated alone would return its
    # memory and fault it in again every time.
    keep_pages()
    torch.manual_seed(0)
    default = torch.get_num_threads()
    counts = [threads] * len(calls) if isinstance(threads, int) else list(threads)
    counts = [count or default for count in counts]
    clocks = [
        time.thread_time_ns if count == 1 and not by_wall else time.perf_counter_ns
        for count, by_wall in zip(counts, wall or [False] * len(calls), strict=True)
    ]
    _prepare_together(calls)
    results: list[dict[str, Any]] = []
    timers: list[_Timer | None] = []
    # Pairs of duration and share of waiting.
    samples: list[list[tuple[float, float]]] = [[] for _ in calls]
    # Repeated in-place operators may shrink values to denormals, which are slow.
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
                    # What the machine lacks now says nothing about the operator.
                    lacking = isinstance(error, (ImportError, OSError, MemoryError))
                    described = f"{type(error).__name__}: {error}"[:300]
                    results.append({"error": described, "transient": lacking})
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
    for i, pairs in enumerate(samples):
        if pairs:
            ordered = sorted(pairs)
            middle = ordered[len(ordered) // 2]
            quarter = len(ordered) // 4
            spread = (ordered[-1 - quarter][0] - ordered[quarter][0]) / 2 / max(middle[0], 1e-9)
            # The minimum of differences would have the largest noise in the subtracted part.
            difference = str(calls[i][0]).startswith(CHECKPOINT)
            nanoseconds, waited = middle if difference else ordered[0]
            # Without interference it takes between the time without waiting and all of it.
            spread = math.hypot(spread, math.log1p(-waited))
            results[i] = {"nanoseconds": nanoseconds, "spread": spread, "waited": waited} | needs[i]
    return results


def _with_waiting(timer: Callable[[], float]) -> tuple[float, float]:
    """Return the result of `timer` and the share of time its threads waited for a core."""
    waited, began = waited_ns(), time.perf_counter_ns()
    sample = timer()
    elapsed_ns = time.perf_counter_ns() - began
    # The sum decreases if a thread exited meanwhile.
    return sample, min(max(waited_ns() - waited, 0) / elapsed_ns, _MAX_WAITED)


def waited_ns() -> int:
    """Return how long this process's threads have waited for a core so far; 0 if unknown.

    Source: the second number of ``/proc/PID/task/TID/schedstat`` (Linux).
    """
    total = 0
    for path in glob.iglob("/proc/self/task/*/schedstat"):
        # A thread may exit meanwhile.
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int(Path(path).read_text().split()[1])
    return total


@dataclass(frozen=True)
class _Timer:
    """Functions that time one call.

    Attributes:
        sample: runs the call for about two milliseconds; returns ns per call.
        once: runs the call once and returns its outputs; None if it is not an operator.
    """

    sample: Callable[[], float]
    once: Callable[[], object] | None = None


def _needs(works: Sequence[Callable[[], object] | None]) -> list[dict[str, Any]]:
    """Return ``workspace`` and ``made`` of an `Answer` for each function; {} for None."""
    import torch
    from torch._C._profiler import _EventType
    from torch.utils._pytree import tree_leaves

    needs: list[dict[str, Any]] = [{} for _ in works]
    if not any(works):
        return needs
    activities = [torch.profiler.ProfilerActivity.CPU]
    # One profiler for all, since starting and stopping it takes longer than most operators.
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        for i, work in enumerate(works):
            if work is not None:
                with torch.profiler.record_function(f"{_WORK}{i}"):
                    outputs = tree_leaves(work())
                tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
                needs[i]["made"] = [tensor.untyped_storage().nbytes() for tensor in tensors]
                del outputs, tensors
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        if not event.name.startswith(_WORK):
            stack.extend(event.children)
            continue
        inside, changes = [event], []
        while inside:
            inner = inside.pop()
            inside.extend(inner.children)
            if inner.tag == _EventType.Allocation and inner.extra_fields.device.type == "cpu":
                changes.append((inner.start_time_ns, inner.extra_fields.alloc_size))
        levels = list(itertools.accumulate((size for _, size in sorted(changes)), initial=0))
        needs[int(event.name.removeprefix(_WORK))]["workspace"] = max(levels) - levels[-1]
    return needs


def _timer(call: Call, clock: Callable[[], int], warm: bool = False) -> _Timer:
    import torch

    if call.op.startswith(TAKE_BATCH):
        return _Timer(_take_batch(call))
    if call.op.startswith(IN_MODE):
        return _in_mode(call, clock)
    if call.op.startswith(CHECKPOINT):
        return _Timer(checkpoint_overhead(call.arguments[0], clock))
    if (make := _registered(call.name)) is not None:
        return _Timer(_repeated(make(call), clock))
    mode = torch.enable_grad if call.name in _DEPENDS_ON_MODE else contextlib.nullcontext
    return _operator_timer(call, clock, mode=mode, max_sets=1 if warm else _MAX_SETS)


def _registered(name: str) -> Callable[[Call], Callable[[], object]] | None:
    """Return the installed timer of this name, or None."""
    namespace, _, short = name.partition("::")
    if namespace != "slipstream":
        return None
    for point in entry_points(group=TIMERS, name=short):
        timer: Callable[[Call], Callable[[], object]] = point.load()
        return timer
    return None


def _prepare_together(calls: Sequence[Any]) -> None:
    """Pass the calls of each timer to its entry point in ``slipstream.timers_together``.

    Errors are ignored here; each call's own timer raises them again.
    """
    for point in entry_points(group=TOGETHER):
        batch = [call for call in calls if str(call[0]).startswith(f"slipstream::{point.name}(")]
        if len(batch) > 1:
            with contextlib.suppress(Exception):
                point.load()([Call.from_json(call) for call in batch])


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
    prepare: Callable[[Any], Any] = lambda inputs: inputs,
    mode: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    max_sets: int = _MAX_SETS,
) -> _Timer:
    """Return a timer of an operator in `mode`; `prepare` is applied to every set of inputs."""
    operator, positional, named = _resolve(call)
    size = sum(spec.nbytes for spec in call.inputs) + sum(spec.nbytes for spec in call.outputs)

    def new_inputs() -> Any:
        keyed = {name: make() for name, make in named.items()}
        return prepare((tuple(make() for make in positional), keyed))

    arguments, keywords = new_inputs()
    with mode():
        for _ in range(2):
            start = clock()
            operator(*arguments, **keywords)
            elapsed_ns = max(clock() - start, 200)
            if elapsed_ns > _LONG_NS:
                break
    repeats = max(1, round(_SAMPLE_NS / elapsed_ns))
    # At most one per repetition, since creating inputs takes longer than most operators.
    sets = max(1, min(max_sets, _ROTATED_BYTES // max(size, 1), repeats))
    inputs = [(arguments, keywords), *(new_inputs() for _ in range(sets - 1))]
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
    """Return the operator, and factories of its positional and keyword-only arguments."""
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
    """Return an optimizer with gradients, after the step that creates its state.

    Gradients have as many zeros as recorded, contiguously, like unused rows of an embedding.
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
    """Return a function that runs one pass of a module.

    The call's arguments are the class (``package.module:Class``), its settings as pairs, the input,
    and whether to time the backward pass. Integer inputs are indices below ``num_embeddings``; the
    backward pass then goes to the parameters.
    """
    import torch

    path, settings, spec, backward = call.arguments
    home, _, name = path.partition(":")
    module = getattr(importlib.import_module(home), name)(**dict(settings))
    inputs = random_tensor(spec, getattr(module, "num_embeddings", 1))
    floating = inputs.is_floating_point()
    sources = [inputs.requires_grad_()] if floating else list(module.parameters())

    def forward() -> Any:
        with torch.enable_grad():
            return module(inputs)

    if not backward:
        return forward
    output = forward()
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, sources, gradient, retain_graph=True)


def _in_mode(call: Call, clock: Callable[[], int]) -> _Timer:
    """Time an operator in a mode of autograd.

    The call's arguments are the mode (``grad``, ``no_grad``, ``inference``), the operator, its
    arguments, and the role of each tensor: a ``parameter``, an ``activation`` computed from
    parameters, or ``other``.
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

    def prepare(inputs: Any) -> Any:
        remaining = iter(roles)

        def as_in_step(tensor: Any) -> Any:
            role = next(remaining)
            if mode == "inference" and role == "activation":
                with enter():
                    return tensor.clone(memory_format=torch.preserve_format)
            traced = role != "other" and tensor.is_floating_point()
            return tensor.requires_grad_() if mode == "grad" and traced else tensor

        return tree_map_only(torch.Tensor, as_in_step, inputs)

    return _operator_timer(inner, clock, prepare, enter)


def _take_batch(call: Call) -> Callable[[], float]:
    """Return a function that takes a batch from a worker, and returns the ns of CPU time.

    CPU time excludes waiting for the worker, for any number of threads.
    """
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Batches(IterableDataset[list[Any]]):
        """Endless batches of the given shapes, which torch copies to shared memory."""

        def __iter__(self) -> Iterator[list[Any]]:
            while True:
                yield [random_tensor(spec) for spec in call.arguments]

    batches = iter(DataLoader(Batches(), batch_size=None, num_workers=1))

    def sample() -> float:
        begin = time.thread_time_ns()
        batch = next(batches)
        for tensor in batch:
            # Includes the first access to each page of shared memory.
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
    """Return a random tensor with `spec`'s dtype, shape and strides; integers are in [0, bound)."""
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


_cached_numbers: list[Any] = []


def _random_numbers(count: int) -> Any:
    """Return cached random float32 [count]; copying them is ten times as fast as drawing them.

    They are positive and away from zero, to avoid denormals and errors of sqrt, log and division.
    """
    import torch

    if not _cached_numbers or len(_cached_numbers[0]) < count:
        _cached_numbers[:] = [torch.rand(count, dtype=torch.float32).mul_(0.1).add_(0.01)]
    return _cached_numbers[0][:count]


def _index_bound(call: Call) -> int:
    """Return the bound of valid indices in integer tensors of `call`; 1 if it is unknown."""
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
