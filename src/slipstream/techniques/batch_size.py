"""Another number of samples per step: fixed costs are shared by more of them.

Predicted from one profile, which keeps the form of every call at a second batch size; see
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

from slipstream.durations import Changed, required_timings, rescale
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

_NOT_RECORDED = "the profile has the step at one batch size only; profile it again"
_SETTING = re.compile(r"(x?)([0-9]+(?:\.[0-9]+)?)")
# Operators that read a buffer another one filled, of a size that only their library knows.
_READS_BUFFER = "aten::mkldnn_rnn_layer_backward"
_SPARE_BYTES = 1 << 16
# Bytes by which a storage may be larger than its tensor for alignment alone.
_ALIGNED_BYTES = 512
# Calls of a batch of micro-benchmarks, with as much again left free.
_HELD_AT_ONCE = 48
_LARGEST = 1e7


@dataclass(frozen=True)
class BatchSize(TechniqueSettings):
    """Steps of ``batch_size:64`` samples, or of ``batch_size:x2`` times as many as now."""

    samples: str = "x2"

    name: ClassVar[str] = "batch_size"
    traits: ClassVar[Traits] = Traits(stage=Stage.BATCH)

    def __post_init__(self) -> None:
        match = _SETTING.fullmatch(self.samples)
        number = float(match[2]) if match else 0.0
        whole = match is not None and (bool(match[1]) or number.is_integer())
        if not whole or not 0 < number <= _LARGEST:
            raise InvalidArgumentError(
                "batch_size:samples",
                f"'{self.samples}' is neither a number of samples nor how many times as many",
                remedy="for example batch_size:64 or batch_size:x2",
            )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None, or why the step cannot be told at another number of samples."""
        if (reason := already_compiled(graph)) is not None:
            return reason
        recorded: Any = graph.meta.get("shrunk")
        if isinstance(recorded, dict) and recorded.get("reason"):
            return str(recorded["reason"])
        if not _has_two_sizes(graph):
            return _NOT_RECORDED
        wanted = self._of(graph.samples)
        if wanted.denominator != 1:
            return f"{self.samples[1:]} times {graph.samples} samples is not an integer"
        if wanted == graph.samples:
            return f"the step has {graph.samples} samples already"
        if (wanted * recorded["of"] / graph.samples).denominator != 1:
            return f"{wanted} samples are no whole batch: a step has {graph.samples} samples"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Every operator that depends on the batch, as it is and at the new size."""
        import psutil

        # They are held all at once; what is left out goes by its bytes.
        largest = psutil.virtual_memory().available // _HELD_AT_ONCE
        changed = _resized_tasks(graph, self._calls(graph))
        fits = tuple(pair for pair in changed.pairs if pair[1].moved_bytes <= largest)
        return required_timings(graph, replace(changed, pairs=fits))

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Scale each operator by its micro-benchmarked ratio; gaps and the update stay."""
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
        wanted = int(self._of(graph.samples))
        edited = edit.apply(f"{wanted} samples per step: {len(changed)} operators resized")
        shrunk: Any = graph.meta["shrunk"]
        return replace(
            edited,
            # Each in its own place, so that its other form stays beside it.
            tasks=replace(edited.tasks, call=graph.tasks.call),
            calls=tuple(
                _roomy(new) if new else old for new, old in zip(calls, graph.calls, strict=True)
            ),
            shrunk=graph.shrunk,
            memory=_resized_memory(graph, calls, factor),
            samples=wanted,
            meta={**graph.meta, "shrunk": {**shrunk, "of": self._resize(graph).target}},
        )

    def apply(self, built: BuiltWorkload) -> None:
        """Repeat or cut the batch's samples.

        Raises:
            WorkloadError: the step hides its batch, or that many samples make no whole batch.
        """
        wanted = self._of(built.samples)
        if wanted.denominator != 1:
            raise WorkloadError(
                f"{self.samples[1:]} times {built.samples} samples is not an integer"
            )
        built.resize(int(wanted))

    def quality(self, graph: Graph | None = None) -> Quality:
        """In training the learning rate has to follow."""
        if graph is not None and not graph.meta.get("training", True):
            return Quality(QualityKind.EXACT, "each sample is computed as before")
        return Quality(QualityKind.NEEDS_TRAINING, "another batch size needs another learning rate")

    def code(self, workload: Workload) -> CodeChange | None:
        """Another number in the one place that says it; by hand where the data is loaded."""
        number = f"{self.samples[1:]} * N" if self.samples.startswith("x") else self.samples

        def edit(where: Places) -> Source:
            size = find_batch_size(where)
            if not self.samples.startswith("x"):
                raise where.source.not_placed(
                    f"of how many samples one of {size.value} is, the file does not say", size.node
                )
            if "batch_size" in workload.arguments:
                raise where.source.not_placed("it is given another batch_size")
            if flag := next((f for f in size.flags if _overridden(f, workload)), ""):
                raise where.source.not_placed(
                    f"{flag} on the command line overrides the default {size.value}", size.node
                )
            wanted = self._of(size.value)
            if wanted.denominator != 1:
                raise where.source.not_placed(
                    f"{self.samples[1:]} times {size.value} is not an integer", size.node
                )
            return size.set(int(wanted))

        return CodeChange.of(
            workload,
            edit,
            by_hand=f"DataLoader(..., batch_size={number})",
            note="tune the learning rate again",
        )

    def _of(self, samples: int) -> Fraction:
        """How many samples a step of `samples` shall have."""
        times = self.samples.startswith("x")
        return Fraction(self.samples.removeprefix("x")) * (samples if times else 1)

    def _resize(self, graph: Graph) -> Resize:
        recorded: Any = graph.meta["shrunk"]
        wanted = self._of(graph.samples) * recorded["of"] / graph.samples
        return Resize(recorded["of"], recorded["samples"], int(wanted))

    def _calls(self, graph: Graph) -> list[Call | None]:
        """By number in ``graph.calls``: the call at the new size; None where that is unknown."""
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
    # A file may say anything.
    return all(type(size) is int and size > 0 for size in sizes) and sizes[0] != sizes[1]


def _resized_tasks(graph: Graph, calls: Sequence[Call | None]) -> Changed:
    """The tasks whose call is another at the new size."""
    new = {
        number: _roomy(call)
        for number, (recorded, call) in enumerate(zip(graph.calls, calls, strict=True))
        if call is not None and call is not recorded
    }
    return Changed.by_call(graph, np.arange(len(graph)), new)


def _roomy(call: Call) -> Call:
    """`call` such that running it is safe: a buffer of bytes may need more than a linear rule says.

    oneDNN rounds the parts of its workspaces up, and reads past the end of one that is too short.
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
    """Tasks outside of the update of which nothing tells how they depend on the batch."""
    unknown = np.array([*(call is None for call in calls), False])  # -1 is not a call
    return np.flatnonzero(unknown[graph.tasks.call] & (graph.tasks.phase != StepPhase.OPTIMIZER))


def _resized_memory(graph: Graph, calls: Sequence[Call | None], factor: float) -> Allocations:
    """`graph`'s allocations with as many bytes as they need under `calls`.

    A storage grows as the tensor in it does, which is seen where an operator makes it, or else
    where one first reads it. A workspace grows as what its operator reads and writes. What the
    step before left grows as what this one leaves. Of what no operator touches, only inputs grow.

    Args:
        calls: by number in ``graph.calls``: the call in the other step; None where unknown.
        factor: how many times as many samples that step has.
    """
    memory = graph.memory
    tensors = _Tensors.of(graph, calls)
    growth = np.where(memory.role == Role.INPUT, factor, 1.0)
    mask = (memory.producer >= 0) & ~np.isin(memory.role, (Role.GRADIENT, Role.OPTIMIZER))
    growth[mask] = _operator_growth(graph, calls, factor)[graph.tasks.call[memory.producer[mask]]]
    pair = _made(graph, tensors)
    unseen = np.flatnonzero((pair < 0) & (memory.storage >= 0))
    pair[unseen] = _first_read(graph, tensors, memory.take(unseen))
    # Where far more lies there than the tensor needs, it is what the operator had before it
    # reduced it.
    roomy = memory.nbytes > 2 * tensors.nbytes[pair] + _ALIGNED_BYTES
    seen = np.flatnonzero((pair >= 0) & ~((memory.producer >= 0) & roomy))
    growth[seen] = tensors.growth[pair[seen]]
    before, after = memory.handed_on()
    growth[before] = growth[after]
    return replace(memory, nbytes=np.rint(memory.nbytes * growth).astype(np.int64))


@dataclass(frozen=True)
class _Tensors:
    """The tensors of every call, its inputs first, as they are and in the other step.

    Attributes:
        start: int64 [calls + 1], where those of a call begin; the last stands for no call.
        inputs, count: int64 [calls + 1], how many it reads and how many it has in all; 0 where
            the call in the other step is not known.
        nbytes: int64 [tensors].
        growth: float64 [tensors], bytes in the other step over these.
    """

    start: NDArray[np.int64]
    inputs: NDArray[np.int64]
    count: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    growth: NDArray[np.float64]

    @classmethod
    def of(cls, graph: Graph, calls: Sequence[Call | None]) -> _Tensors:
        """Of ``graph.calls`` beside `calls`."""
        inputs, count, before_bytes, after_bytes = [], [], [], []
        for old, new in zip(graph.calls, calls, strict=True):
            tensors = () if new is None else (*old.inputs, *old.outputs)
            inputs.append(0 if new is None else len(old.inputs))
            count.append(len(tensors))
            before_bytes += [one.nbytes for one in tensors]
            after_bytes += [] if new is None else [s.nbytes for s in (*new.inputs, *new.outputs)]
        before, after = np.array([before_bytes, after_bytes], np.int64)
        growth = np.where(before > 0, after / np.maximum(before, 1), 1.0)
        counts = np.array([*count, 0])
        return cls(np.cumsum(counts) - counts, np.array([*inputs, 0]), counts, before, growth)


def _made(graph: Graph, tensors: _Tensors) -> NDArray[np.int64]:
    """By allocation: the tensor of its producer's that lies in it, -1 where there is none.

    Of several tensors in one storage the largest counts: the others are views of parts.
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
        there = (nth < tensors.count[call]) & (at < graph.operand_start[task + 1])
        here, call, nth, at = here[there], call[there], nth[there], at[there]
        pair = tensors.start[call] + nth
        larger = (largest[here] < 0) | (tensors.nbytes[largest[here]] < tensors.nbytes[pair])
        chosen = larger & (graph.operands[at] == memory.storage[here])
        largest[here[chosen]] = pair[chosen]
        place += 1
    return largest


def _first_read(graph: Graph, tensors: _Tensors, memory: Allocations) -> NDArray[np.int64]:
    """By allocation: the tensor as which it is first read while it lives, or -1."""
    if not len(memory):
        return np.empty(0, np.int64)
    storage = memory.storage.astype(np.int64)
    wanted = np.zeros(max(graph.operands.max(initial=-1), storage.max()) + 2, bool)
    wanted[storage] = True
    at = np.flatnonzero(wanted[graph.operands])
    task = np.searchsorted(graph.operand_start, at, side="right") - 1
    call, nth = graph.tasks.call[task], at - graph.operand_start[task]
    reads = nth < tensors.inputs[call]
    at, task, pair = at[reads], task[reads], (tensors.start[call] + nth)[reads]
    # In ascending order, with room for every task behind each storage.
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
    """By number of a call, and at the end of none: what it moves there over what it moves here."""
    return np.array(
        [
            *(
                factor if new is None else new.moved_bytes / max(old.moved_bytes, 1)
                for old, new in zip(graph.calls, calls, strict=True)
            ),
            factor,
        ]
    )
