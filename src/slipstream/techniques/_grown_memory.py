"""What a step allocates when its calls have grown or shrunk with the number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import Allocations, Call, Graph, Role


def resized_memory(graph: Graph, calls: Sequence[Call | None], factor: float) -> Allocations:
    """`graph`'s allocations with as many bytes as they need under `calls`.

    A storage grows as the tensor in it does, which is seen where an operator makes it, or else
    where one first reads it. A workspace grows as what its operator reads and writes. Of what no
    operator touches, only inputs grow.

    Args:
        calls: by number in ``graph.calls``: the call in the other step; None where unknown.
        factor: how many times as many samples that step has.
    """
    memory = graph.memory
    tensors = _Tensors.of(graph, calls)
    growth = np.where(memory.role == Role.INPUT, factor, 1.0)
    own = (memory.producer >= 0) & ~np.isin(memory.role, (Role.GRADIENT, Role.OPTIMIZER))
    growth[own] = _operator_growth(graph, calls, factor)[graph.tasks.call[memory.producer[own]]]
    pair = _made(graph, tensors)
    unseen = np.flatnonzero((pair < 0) & (memory.storage >= 0))
    pair[unseen] = _first_read(graph, tensors, memory.take(unseen))
    seen = np.flatnonzero(pair >= 0)
    growth[seen] = tensors.growth[pair[seen]]
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
    found = np.full(len(memory), -1)
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
        larger = (found[here] < 0) | (tensors.nbytes[found[here]] < tensors.nbytes[pair])
        chosen = larger & (graph.operands[at] == memory.storage[here])
        found[here[chosen]] = pair[chosen]
        place += 1
    return found


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
