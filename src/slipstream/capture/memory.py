"""Allocations of one step, attributed to its tasks.

PyTorch's profiler reports every allocation and free with its address, and the addresses of every
operator's inputs. It does not report frees of memory allocated before it started, so it runs over
two steps and the second is read. The storages at the start of that follow from the allocations of
the first and from a walk over model, optimizer and batch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.events import MARKER, mark, profiler
from slipstream.capture.memory_align import REMEDY, fit, unseen_bytes
from slipstream.capture.modules import PREFIX
from slipstream.capture.trace import Node
from slipstream.capture.units import Units
from slipstream.graph import Allocations, Role, StepPhase
from slipstream.units import format_bytes

if TYPE_CHECKING:
    import torch

    from slipstream.workload import BuiltWorkload

_OPTIMIZER = int(StepPhase.OPTIMIZER)
# Maximum missing share of the peak if the watched step lacks a few operators.
_MAX_UNSEEN = 0.01
NOTHING_SEEN = "PyTorch allocated nothing in the step that was watched for it"
"""Reason for missing allocations if `read_memory` finds none."""
Held = dict[int, tuple[int, Role]]
"""Bytes and role of storages, by address."""


@dataclass(frozen=True)
class MemoryRecord:
    """The profiler's record of the memory of one step.

    Attributes:
        names: Operators and annotations of the e events in pre-order.
        start_ns, end_ns: int64 [e].
        inputs: By event: (address, bytes) of the storage of each input tensor.
        changes: (time in ns, address, bytes; negative if freed), by time.
        before: Storages at the start of the step.
        gradients: Addresses of parameters' gradients at its end.
    """

    names: tuple[str, ...]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    inputs: tuple[tuple[tuple[int, int], ...], ...]
    changes: tuple[tuple[int, int, int], ...]
    before: Held
    gradients: frozenset[int]


def held(built: BuiltWorkload, device: str = "cpu") -> Held:
    """Return the storages of parameters, gradients, buffers, optimizer state and batch.

    Args:
        device: Kind of device whose memory to consider: "cpu" or "cuda".
    """
    import torch
    from torch.utils._pytree import tree_leaves

    storages: Held = {}

    def add(values: Iterable[Any], role: Role) -> None:
        for tensor in _unwrapped(values):
            if tensor.layout is not torch.strided:
                continue
            # Tensors inside torch.func's transforms have no storage of their own.
            wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            if tensor.device.type == device and not wrapped:
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    storages.setdefault(storage.data_ptr(), (storage.nbytes(), role))

    parameters = _parameters(built)
    add(parameters, Role.PARAMETER)
    add((parameter.grad for parameter in parameters), Role.GRADIENT)
    for module in _modules(built):
        add(module.buffers(), Role.BUFFER)
    if built.optimizer is not None:
        add(tree_leaves(dict(getattr(built.optimizer, "state", {}))), Role.OPTIMIZER)
    add(tree_leaves(built.batch), Role.INPUT)
    return storages


def _unwrapped(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Return the tensors of `values`, those inside a wrapper (such as a DTensor) instead of it."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    for value in values:
        if is_traceable_wrapper_subclass(value):
            yield from _unwrapped(getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, torch.Tensor):
            yield value


def gradients(built: BuiltWorkload, device: str = "cpu") -> frozenset[int]:
    """Return the addresses of the current gradients on that kind of device."""
    return frozenset(ptr for ptr, (_, role) in held(built, device).items() if role is Role.GRADIENT)


def _modules(built: BuiltWorkload) -> list[Any]:
    import torch

    return [part for part in (built.model, built.loss) if isinstance(part, torch.nn.Module)]


def _parameters(built: BuiltWorkload) -> list[Any]:
    optimized = [
        parameter
        for group in getattr(built.optimizer, "param_groups", ())
        for parameter in group["params"]
    ]
    return [*(p for module in _modules(built) for p in module.parameters()), *optimized]


def record_memory(built: BuiltWorkload) -> Generator[None, None, tuple[Any, MemoryRecord | None]]:
    """Run two steps; return their profiler and the memory of the second, None if not seen."""
    with profiler(record_shapes=True, profile_memory=True) as watching:
        yield
        before = held(built)
        mark()
        yield
        mark()
        after = gradients(built)
    return watching, read_memory(watching, before, after)


def read_memory(watched: Any, before: Held, after: frozenset[int]) -> MemoryRecord | None:
    """Read the step between the last two step markers; None without allocations in it."""
    from torch._C._profiler import _EventType

    # Each field is a call into the profiler: read none twice.
    operators: list[tuple[int, int, str, Any]] = []
    changes: list[tuple[int, int, int]] = []
    for event in _pre_order(watched.profiler.kineto_results.experimental_event_tree()):
        tag = event.tag
        if tag == _EventType.TorchOp:
            operators.append((event.start_time_ns, event.end_time_ns, event.name, event))
        elif tag == _EventType.Allocation:
            change = event.extra_fields
            if change.device.type == "cpu":
                changes.append((event.start_time_ns, change.ptr, change.alloc_size))
    marks = sorted((row for row in operators if row[2] == MARKER), key=lambda row: row[0])
    if len(marks) < 2:
        return None
    begin, end, thread = marks[-2][1], marks[-1][0], marks[-1][3].start_tid
    within = [
        row
        for row in operators
        if begin <= row[0] < end and row[3].start_tid == thread and not row[2].startswith(PREFIX)
    ]
    within.sort(key=lambda row: (row[0], -row[1]))
    changes.sort(key=lambda change: change[0])
    inside = tuple(change for change in changes if begin <= change[0] < end)
    if not inside:
        return None
    earlier = ((ptr, size) for time, ptr, size in changes if time < begin)
    return MemoryRecord(
        names=tuple(name for _, _, name, _ in within),
        start_ns=np.array([start for start, _, _, _ in within], np.int64),
        end_ns=np.array([min(until, end) for _, until, _, _ in within], np.int64),
        inputs=tuple(tuple(_storages(event.extra_fields.inputs)) for _, _, _, event in within),
        changes=inside,
        before=alive_after(earlier, before),
        gradients=after,
    )


def peak_bytes(record: MemoryRecord) -> int:
    """Return the peak of allocated bytes, including inputs whose allocation was not seen."""
    alive = {address: nbytes for address, (nbytes, _) in record.before.items()}
    steps: list[tuple[int, int, tuple[tuple[int, int], ...]]] = [
        (time, 0, inputs)
        for time, inputs in zip(record.start_ns.tolist(), record.inputs, strict=True)
    ]
    steps += [(time, change, ((address, abs(change)),)) for time, address, change in record.changes]
    level = peak = sum(alive.values())
    unseen = 0
    for _, change, storages in sorted(steps, key=lambda step: step[0]):
        for address, nbytes in storages:
            if change < 0:
                level -= alive.pop(address, 0)
            elif change > 0:
                alive[address] = nbytes
                level += nbytes
            elif address and address not in alive:
                alive[address] = nbytes
                unseen += nbytes  # allocated throughout the step
        peak = max(peak, level)
    return peak + unseen


def _pre_order(roots: Sequence[Any]) -> Iterator[Any]:
    stack = list(reversed(roots))
    while stack:
        event = stack.pop()
        yield event
        stack.extend(reversed(event.children))


def _storages(inputs: Iterable[Any]) -> Iterator[tuple[int, int]]:
    for value in inputs:
        if isinstance(value, (list, tuple)):
            yield from _storages(value)
        elif hasattr(value, "storage_data_ptr"):
            extent, sizes = 0, value.sizes
            if all(sizes):
                steps = zip(sizes, value.strides, strict=False)
                extent = 1 + sum((size - 1) * stride for size, stride in steps)
            yield int(value.storage_data_ptr or 0), extent * value.dtype.itemsize


def allocations(
    record: MemoryRecord | None, trace: Sequence[Node], units: Units, parameters: Sequence[int]
) -> tuple[Allocations, str]:
    """Return the allocations of a step with tasks for its start (0) and `units`, or why not.

    Within a task, only its peak counts, as its workspace. If the watched step ran the same
    operators as the recorded one, the peak of the allocations is exactly that of the watched step.

    Returns:
        Allocations and an empty string; or no allocations and the reason.
    """
    if record is None:
        return Allocations.none(), NOTHING_SEEN
    fitted = fit(record, units)
    if isinstance(fitted, str):
        return Allocations.none(), fitted
    record, present = fitted
    sweep = _Sweep(record, trace, units)
    sweep.run()
    unseen = unseen_bytes(trace, units, present)
    if unseen > _MAX_UNSEEN * sweep.peak_bytes:
        return Allocations.none(), (
            "the step recorded for memory lacks operators that allocate "
            f"{format_bytes(unseen)} in the recorded step; {REMEDY}"
        )
    return sweep.allocations(set(parameters)), ""


def is_fitting(record: MemoryRecord | None, trace: Sequence[Node], units: Units) -> bool:
    """Whether `record` gives allocations, so that no other is needed; fast if the steps agree."""
    if record is None or record.names == units.events:
        return True
    return not allocations(record, trace, units, ())[1]


@dataclass(eq=False)
class _Row:
    """One allocation, later a row of `Allocations`."""

    nbytes: int
    role: Role
    producer: int
    storage: int = -1
    release: int = -1
    segment: int = -1
    ptr: int = 0
    updated: bool = False
    """Whether the optimizer reads or writes it."""
    passing: bool = False
    """Whether it is freed before the next task starts."""


class _Sweep:
    """Pass through the step in time order, with the live allocation at every address."""

    def __init__(self, record: MemoryRecord, trace: Sequence[Node], units: Units) -> None:
        self._record = record
        self._units = units
        events = [i for i, node in enumerate(trace) if not node.name.startswith(PREFIX)]
        self._nodes = [trace[i] for i in events]
        # Lists, since they are read element by element.
        self._start: list[int] = record.start_ns[units.first].tolist()
        self._end: list[int] = record.end_ns[units.first].tolist()
        self._phase: list[int] = [StepPhase.OTHER, *units.phase.tolist()]
        self._rows = [_Row(size, role, -1, ptr=ptr) for ptr, (size, role) in record.before.items()]
        self._live = {row.ptr: row for row in self._rows}
        tasks = len(units.nodes) + 1
        self._peak = np.zeros(tasks, np.int64)
        self._level = sum(row.nbytes for row in self._rows)
        self._last_inside = -1
        self._task = 0

    def run(self) -> None:
        record = self._record
        self._peak[0] = self._level
        operators = zip(record.start_ns.tolist(), range(len(record.names)), strict=True)
        steps: list[tuple[int, int, Any]] = [(time, 0, event) for time, event in operators]
        steps += [(change[0], 1, change) for change in record.changes]
        steps.sort(key=lambda step: step[:2])
        for time, kind, what in steps:
            self._advance(time)
            if kind == 0:
                self._read_inputs(what)
            elif what[2] > 0:
                self._allocate(*what)
            else:
                self._free(time, what[1])
        self._advance(self._end[-1] + 1)

    @property
    def peak_bytes(self) -> int:
        """Peak of allocated bytes."""
        return int(self._peak.max())

    def _advance(self, time: int) -> None:
        """Open every task that starts by `time`."""
        while self._task < len(self._start) and self._start[self._task] <= time:
            self._task += 1
            self._peak[self._task] = self._level

    def _inside(self, time: int) -> bool:
        return self._task > 0 and time < self._end[self._task - 1]

    def _read_inputs(self, event: int) -> None:
        """Record the addresses of storages from an operator's inputs."""
        node = self._nodes[event]
        inputs = self._record.inputs[event]
        if node.call is None or len(node.call.inputs) != len(inputs):
            return
        updating = self._phase[self._task] == _OPTIMIZER
        for (ptr, nbytes), storage in zip(inputs, node.storages, strict=False):
            row = self._live.get(ptr)
            if row is None:
                if not ptr or not nbytes:
                    continue
                # Neither the profiler nor the walk has seen it.
                row = self._live[ptr] = _Row(nbytes, Role.INPUT, -1, ptr=ptr)
                self._rows.append(row)
                self._level += nbytes
                self._peak[: self._task + 1] += nbytes
            if row.storage < 0:
                row.storage = storage
            row.updated |= updating

    def _allocate(self, time: int, ptr: int, nbytes: int) -> None:
        inside = self._inside(time)
        # Between two tasks, attribute it to the next one.
        producer = self._task if inside else min(self._task + 1, len(self._start))
        row = _Row(nbytes, Role.OTHER, producer, segment=self._task, ptr=ptr)
        self._live[ptr] = row
        self._rows.append(row)
        self._level += nbytes
        self._peak[self._task] = max(self._peak[self._task], self._level)
        if inside:
            self._last_inside = self._task

    def _free(self, time: int, ptr: int) -> None:
        row = self._live.pop(ptr, None)
        if row is None:
            return
        self._level -= row.nbytes
        if row.segment == self._task:
            row.passing = True
            return
        row.release = self._task
        if self._inside(time) and self._last_inside != self._task and row.producer < self._task:
            row.release -= 1  # freed before the task allocates anything

    def allocations(self, parameters: set[int]) -> Allocations:
        """Return the rows, and the workspaces of tasks that need more memory temporarily."""
        rows = [
            (r.nbytes, r.storage, self._role(r, parameters), r.producer, r.release)
            for r in self._rows
            if not r.passing
        ]
        return with_workspaces(Allocations.of(*zip(*rows, strict=True)), self._peak)

    def _role(self, row: _Row, parameters: set[int]) -> Role:
        if row.producer < 0:
            if row.role is Role.INPUT and row.storage in parameters:
                return Role.PARAMETER
            if row.role is Role.INPUT and row.updated:
                return Role.OPTIMIZER
            return row.role
        freed = self._phase[row.release] if row.release >= 0 else None
        gradient = row.updated or (freed is None and row.ptr in self._record.gradients)
        return role_between(self._phase[row.producer], freed, gradient)


def with_workspaces(allocated: Allocations, peak: NDArray[np.int64]) -> Allocations:
    """Add workspaces to `allocated` for the additional temporary memory of tasks.

    Args:
        peak: int64 [tasks], peak of allocated bytes during each task; 0 if unknown.
    """
    change = np.zeros(len(peak) + 1, np.int64)
    freed = np.where(allocated.release >= 0, allocated.release + 1, len(peak))
    np.add.at(change, np.maximum(allocated.producer, 0), allocated.nbytes)
    np.subtract.at(change, freed, allocated.nbytes)
    excess = peak - np.cumsum(change)[:-1]
    tasks = np.flatnonzero(excess > 0)
    columns = (excess[tasks], np.full(len(tasks), -1), [Role.TEMPORARY] * len(tasks), tasks, tasks)
    return allocated.joined(Allocations.of(*columns))


def alive_after(changes: Iterable[tuple[int, int]], before: Held) -> Held:
    """Return `before` with the storages alive after `changes` (address, bytes; negative if freed).

    Addresses in `before` keep their role; others get `Role.OTHER`.
    """
    alive: dict[int, int] = {}
    for address, nbytes in changes:
        if nbytes > 0:
            alive[address] = nbytes
        else:
            alive.pop(address, None)
    others = {at: (size, Role.OTHER) for at, size in alive.items() if at not in before}
    return {**before, **others}


def role_between(allocated: int, freed: int | None, gradient: bool) -> Role:
    """Return the role of memory that an operator allocates, from the phases of its life.

    Args:
        allocated, freed: Phases; None for memory that outlives the step.
        gradient: Whether it is a parameter's gradient, if the backward pass allocates it.
    """
    if gradient and allocated == StepPhase.BACKWARD:
        return Role.GRADIENT
    if freed is None:
        return Role.OPTIMIZER if allocated == StepPhase.OPTIMIZER else Role.OTHER
    if allocated == StepPhase.FORWARD and freed != StepPhase.FORWARD:
        return Role.ACTIVATION
    return Role.TEMPORARY
