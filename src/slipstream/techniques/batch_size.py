"""batch_size: a different number of samples per step, which share its fixed costs.

Predicted from one profile, which contains the form of every call at a second batch size; see
`slipstream.graph.call`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import CallChanges, required_timings, rescale
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import (
    UNKNOWN_SPREAD,
    Allocations,
    Call,
    Editor,
    Graph,
    Role,
    StepPhase,
)
from slipstream.graph.call import Resize
from slipstream.provenance import Provenance
from slipstream.source import Places, Source, find_batch_size
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.techniques._baseline import already_compiled
from slipstream.workload import BuiltWorkload, Workload

_NOT_RECORDED = "the profile contains the step at one batch size only; profile it again"
_SETTING = re.compile(r"(x?)([0-9]+(?:\.[0-9]+)?)")
# Operators that read a buffer from another one, whose size only their library knows.
_READS_BUFFER = "aten::mkldnn_rnn_layer_backward"
_SPARE_BYTES = 1 << 16
# Maximum bytes that alignment adds to a storage.
_ALIGNED_BYTES = 512
# Calls that a batch of micro-benchmarks holds in memory, with the same amount left free.
_HELD_CALLS = 48
_MAX_SAMPLES = 1e7


@dataclass(frozen=True)
class BatchSize(TechniqueSettings):
    """Run steps of ``batch_size:64`` samples, or of ``batch_size:x2`` times the current number."""

    samples: str = "x2"

    name: ClassVar[str] = "batch_size"
    traits: ClassVar[Traits] = Traits(stage=Stage.BATCH)

    def __post_init__(self) -> None:
        match = _SETTING.fullmatch(self.samples)
        number = float(match[2]) if match else 0.0
        whole = match is not None and (bool(match[1]) or number.is_integer())
        if not whole or not 0 < number <= _MAX_SAMPLES:
            raise InvalidArgumentError(
                "batch_size:samples",
                f"'{self.samples}' is neither a number of samples nor a factor",
                remedy="for example batch_size:64 or batch_size:x2",
            )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why the step cannot be predicted at another batch size; None if it can."""
        if (reason := already_compiled(graph)) is not None:
            return reason
        recorded: Any = graph.meta.get("shrunk")
        if isinstance(recorded, dict) and recorded.get("reason"):
            return str(recorded["reason"])
        if not _has_two_sizes(graph):
            return _NOT_RECORDED
        target = self._of(graph.samples)
        if target.denominator != 1:
            return f"{self.samples[1:]} times {graph.samples} samples is not an integer"
        if target == graph.samples:
            return f"the step has {graph.samples} samples already"
        if (target * recorded["of"] / graph.samples).denominator != 1:
            return f"{target} samples are not a whole batch: a step has {graph.samples} samples"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return every operator that depends on the batch, as recorded and at the new size."""
        import psutil

        # All calls are in memory together; omitted ones are scaled by their bytes.
        largest = psutil.virtual_memory().available // _HELD_CALLS
        changed = _resized_tasks(graph, self._calls(graph))
        fits = tuple(pair for pair in changed.pairs if pair[1].moved_bytes <= largest)
        return required_timings(graph, replace(changed, pairs=fits))

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Scale each operator by its micro-benchmarked ratio; gaps and the update are unchanged."""
        calls, durations = self._calls(graph), context.durations
        changed = _resized_tasks(graph, calls)
        edit = Editor(graph, str(self))
        rescale(edit, graph, changed, durations)
        factor = self._resize(graph).factor
        for pair, (recorded, call) in enumerate(changed.pairs):
            if durations.ratio(recorded, call) is None:
                growth = call.moved_bytes / max(recorded.moved_bytes, 1)
                edit.scale(changed.tasks[changed.pair == pair], growth, Provenance.ASSUMED)
        unknown = _unknown_tasks(graph, calls)
        edit.scale(unknown, factor, Provenance.ASSUMED, spread=UNKNOWN_SPREAD)
        target = int(self._of(graph.samples))
        edited = edit.apply(f"{target} samples per step: {len(changed)} operators resized")
        shrunk: Any = graph.meta["shrunk"]
        others, size = graph.shrunk, shrunk["samples"]
        if self._resize(graph).target == size:
            # The forms of a call must be of two sizes.
            size = shrunk["of"]
            others = tuple(
                None if new is None else old for new, old in zip(calls, graph.calls, strict=True)
            )
        return replace(
            edited,
            # Calls keep their indices, so that each still matches its form in `shrunk`.
            tasks=replace(edited.tasks, call=graph.tasks.call),
            calls=tuple(
                _enlarged(new) if new else old for new, old in zip(calls, graph.calls, strict=True)
            ),
            shrunk=others,
            memory=_resized_memory(graph, calls, factor),
            samples=target,
            meta={
                **graph.meta,
                "shrunk": {**shrunk, "samples": size, "of": self._resize(graph).target},
            },
        )

    def apply(self, built: BuiltWorkload) -> None:
        """Repeat or drop samples of the batch.

        Raises:
            WorkloadError: the step hides its batch, or the samples are not a whole batch.
        """
        target = self._of(built.samples)
        if target.denominator != 1:
            raise WorkloadError(
                f"{self.samples[1:]} times {built.samples} samples is not an integer"
            )
        built.resize(int(target))

    def quality(self, graph: Graph | None = None) -> Quality:
        """Require training, because of the learning rate; inference is exact."""
        if graph is not None and not graph.meta.get("training", True):
            return Quality(QualityKind.EXACT, "each sample is computed the same")
        return Quality(QualityKind.NEEDS_TRAINING, "another batch size needs another learning rate")

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the edit of the only batch size in the file, or a manual edit of the loader."""
        number = f"{self.samples[1:]} * N" if self.samples.startswith("x") else self.samples

        def edit(where: Places) -> Source:
            size = find_batch_size(where)
            if not self.samples.startswith("x"):
                raise where.source.location_error(
                    f"the file does not define how many samples {size.value} stands for", size.node
                )
            if "batch_size" in workload.arguments:
                raise where.source.location_error("the workload is called with another batch_size")
            if flag := next((f for f in size.flags if _overridden(f, workload)), ""):
                raise where.source.location_error(
                    f"{flag} on the command line overrides the default {size.value}", size.node
                )
            target = self._of(size.value)
            if target.denominator != 1:
                raise where.source.location_error(
                    f"{self.samples[1:]} times {size.value} is not an integer", size.node
                )
            return size.set(int(target))

        return CodeChange.of(
            workload,
            edit,
            by_hand=f"DataLoader(..., batch_size={number})",
            note="tune the learning rate again",
        )

    def _of(self, samples: int) -> Fraction:
        """Return the requested number of samples for a step of `samples`."""
        times = self.samples.startswith("x")
        return Fraction(self.samples.removeprefix("x")) * (samples if times else 1)

    def _resize(self, graph: Graph) -> Resize:
        recorded: Any = graph.meta["shrunk"]
        target = self._of(graph.samples) * recorded["of"] / graph.samples
        return Resize(recorded["of"], recorded["samples"], int(target))

    def _calls(self, graph: Graph) -> list[Call | None]:
        """Return each of ``graph.calls`` at the new size; None if unknown."""
        resize = self._resize(graph)
        return [
            None if other is None else resize.call(call, other)
            for call, other in zip(graph.calls, graph.shrunk, strict=True)
        ]


def _overridden(flag: str, workload: Workload) -> bool:
    return any(text.partition("=")[0] == flag for text in workload.script_arguments)


def _has_two_sizes(graph: Graph) -> bool:
    recorded: Any = graph.meta.get("shrunk")
    if not graph.shrunk or not graph.samples or not isinstance(recorded, dict):
        return False
    sizes = [recorded.get(key) for key in ("samples", "of")]
    # The metadata of a file is not validated.
    return all(type(size) is int and size > 0 for size in sizes) and sizes[0] != sizes[1]


def _resized_tasks(graph: Graph, calls: Sequence[Call | None]) -> CallChanges:
    """Return the tasks whose call differs at the new size."""
    new = {
        number: _enlarged(call)
        for number, (recorded, call) in enumerate(zip(graph.calls, calls, strict=True))
        if call is not None and call is not recorded
    }
    return CallChanges.by_call(graph, np.arange(len(graph)), new)


def _enlarged(call: Call) -> Call:
    """Enlarge byte buffers of `call`, so that running it is safe.

    oneDNN rounds up the parts of its workspaces, and reads past the end of one that is too short.
    """
    if call.name != _READS_BUFFER:
        return call
    return call.with_inputs(
        [
            replace(spec, shape=(spec.numel * 3 // 2 + _SPARE_BYTES,))
            if spec.dtype == "uint8" and len(spec.shape) == 1
            else spec
            for spec in call.inputs
        ]
    )


def _unknown_tasks(graph: Graph, calls: Sequence[Call | None]) -> NDArray[np.int64]:
    """Return the tasks outside of the update whose dependence on the batch is unknown."""
    unknown = np.array([*(call is None for call in calls), False])  # -1 is not a call
    return np.flatnonzero(unknown[graph.tasks.call] & (graph.tasks.phase != StepPhase.OPTIMIZER))


def _resized_memory(graph: Graph, calls: Sequence[Call | None], factor: float) -> Allocations:
    """Return the allocations of `graph`, resized for `calls`.

    A storage grows as its tensor does, given by the operator that creates it, or else by its first
    reader. A workspace grows as the bytes that its operator moves. Allocations of the previous step
    grow as those that this step leaves. Of allocations without an operator, only inputs grow.

    Args:
        calls: each of ``graph.calls`` in the other step; None if unknown.
        factor: ratio of samples in that step to those in this one.
    """
    memory = graph.memory
    tensors = _Tensors.of(graph, calls)
    growth = np.where(memory.role == Role.INPUT, factor, 1.0)
    mask = (memory.producer >= 0) & ~np.isin(memory.role, (Role.GRADIENT, Role.OPTIMIZER))
    growth[mask] = _operator_growth(graph, calls, factor)[graph.tasks.call[memory.producer[mask]]]
    pair = _written_tensors(graph, tensors)
    unseen = np.flatnonzero((pair < 0) & (memory.storage >= 0))
    pair[unseen] = _first_read(graph, tensors, memory.take(unseen))
    # A storage much larger than its tensor holds the operator's data before a reduction.
    oversized = memory.nbytes > 2 * tensors.nbytes[pair] + _ALIGNED_BYTES
    seen = np.flatnonzero((pair >= 0) & ~((memory.producer >= 0) & oversized))
    growth[seen] = tensors.growth[pair[seen]]
    before, after = memory.handed_on()
    growth[before] = growth[after]
    return replace(memory, nbytes=np.rint(memory.nbytes * growth).astype(np.int64))


@dataclass(frozen=True)
class _Tensors:
    """Tensors of every call, inputs first, in this and the other step.

    Attributes:
        start: int64 [calls + 1], index of the first tensor of a call; the last is for no call.
        inputs, count: int64 [calls + 1], number of inputs and of all tensors; 0 if the call in
            the other step is unknown.
        nbytes: int64 [tensors].
        growth: float64 [tensors], ratio of bytes in the other step to those in this one.
    """

    start: NDArray[np.int64]
    inputs: NDArray[np.int64]
    count: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    growth: NDArray[np.float64]

    @classmethod
    def of(cls, graph: Graph, calls: Sequence[Call | None]) -> _Tensors:
        """Return the tensors of ``graph.calls`` and `calls`."""
        inputs, count, before_bytes, after_bytes = [], [], [], []
        for old, new in zip(graph.calls, calls, strict=True):
            tensors = () if new is None else (*old.inputs, *old.outputs)
            inputs.append(0 if new is None else len(old.inputs))
            count.append(len(tensors))
            before_bytes += [spec.nbytes for spec in tensors]
            after_bytes += (
                [] if new is None else [spec.nbytes for spec in (*new.inputs, *new.outputs)]
            )
        before, after = np.array([before_bytes, after_bytes], np.int64)
        growth = np.where(before > 0, after / np.maximum(before, 1), 1.0)
        counts = np.array([*count, 0])
        return cls(np.cumsum(counts) - counts, np.array([*inputs, 0]), counts, before, growth)


def _written_tensors(graph: Graph, tensors: _Tensors) -> NDArray[np.int64]:
    """Return the tensor that each allocation's producer writes to it; -1 if there is none.

    Of several tensors in a storage the largest counts: the others are views of parts.
    """
    memory = graph.memory
    largest = np.full(len(memory), -1)
    here = np.flatnonzero(memory.producer >= 0)
    place = 0
    while len(here):
        task = memory.producer[here]
        call = graph.tasks.call[task]
        nth = tensors.inputs[call] + place
        at = graph.operand_start[task] + nth
        exists = (nth < tensors.count[call]) & (at < graph.operand_start[task + 1])
        here, call, nth, at = here[exists], call[exists], nth[exists], at[exists]
        pair = tensors.start[call] + nth
        larger = (largest[here] < 0) | (tensors.nbytes[largest[here]] < tensors.nbytes[pair])
        chosen = larger & (graph.operands[at] == memory.storage[here])
        largest[here[chosen]] = pair[chosen]
        place += 1
    return largest


def _first_read(graph: Graph, tensors: _Tensors, memory: Allocations) -> NDArray[np.int64]:
    """Return the tensor as which each allocation is first read; -1 if never."""
    if not len(memory):
        return np.empty(0, np.int64)
    storage = memory.storage.astype(np.int64)
    target = np.zeros(max(graph.operands.max(initial=-1), storage.max()) + 2, bool)
    target[storage] = True
    at = np.flatnonzero(target[graph.operands])
    task = np.searchsorted(graph.operand_start, at, side="right") - 1
    call, nth = graph.tasks.call[task], at - graph.operand_start[task]
    reads = nth < tensors.inputs[call]
    at, task, pair = at[reads], task[reads], (tensors.start[call] + nth)[reads]
    # Keys that sort by storage, then task.
    room = len(graph) + 1
    key = graph.operands[at] * np.int64(room) + task
    order = np.argsort(key, kind="stable")
    key, pair = np.append(key[order], np.iinfo(np.int64).max), np.append(pair[order], -1)
    end = np.where(memory.release >= 0, memory.release, len(graph))
    first = np.searchsorted(key, storage * room + np.maximum(memory.producer, 0))
    return np.where(key[first] <= storage * room + end, pair[first], -1)


def _operator_growth(
    graph: Graph, calls: Sequence[Call | None], factor: float
) -> NDArray[np.float64]:
    """Return the ratio of moved bytes of each call, and last that of a task without a call."""
    return np.array(
        [
            *(
                factor if new is None else new.moved_bytes / max(old.moved_bytes, 1)
                for old, new in zip(graph.calls, calls, strict=True)
            ),
            factor,
        ]
    )
