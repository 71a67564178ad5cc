"""What a step allocates when its calls have grown or shrunk with the number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slipstream.graph import Allocations, Call, Graph, Role, TensorSpec

_Pair = tuple[TensorSpec, TensorSpec]


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
    reads, makes = _tensors(graph, calls)
    nbytes = memory.nbytes.copy()
    for a in range(len(memory)):
        storage, producer, release = (
            int(column[a]) for column in (memory.storage, memory.producer, memory.release)
        )
        pairs = [makes[producer, storage]] if (producer, storage) in makes else []
        if not pairs and storage >= 0:
            end = release if release >= 0 else len(graph)
            uses = reads.get(storage, ())
            pairs = [pair for task, pair in uses if producer <= task <= end][:1]
        if pairs:
            old, new = pairs[0]
            growth = new.nbytes / old.nbytes if old.nbytes else 1.0
        elif producer >= 0 and memory.role[a] not in (Role.GRADIENT, Role.OPTIMIZER):
            growth = _operator_growth(graph, calls, producer, factor)
        else:
            growth = factor if memory.role[a] == Role.INPUT else 1.0
        nbytes[a] = round(int(nbytes[a]) * growth)
    return replace(memory, nbytes=nbytes.astype(np.int64))


def _tensors(
    graph: Graph, calls: Sequence[Call | None]
) -> tuple[dict[int, list[tuple[int, _Pair]]], dict[tuple[int, int], _Pair]]:
    """(task, tensor) by storage that is read; tensor by (task, storage) that is written.

    Of several tensors in one storage the largest counts: the others are views of parts.
    """
    reads: dict[int, list[tuple[int, _Pair]]] = {}
    makes: dict[tuple[int, int], _Pair] = {}
    for t, number in enumerate(graph.tasks.call.tolist()):
        new = calls[number] if number >= 0 else None
        if new is None:
            continue
        old, storages = graph.calls[number], graph.storages(t).tolist()
        pairs = zip((*old.inputs, *old.outputs), (*new.inputs, *new.outputs), strict=True)
        for place, (storage, pair) in enumerate(zip(storages, pairs, strict=False)):
            if place < len(old.inputs):
                reads.setdefault(storage, []).append((t, pair))
            elif (t, storage) not in makes or makes[t, storage][0].nbytes < pair[0].nbytes:
                makes[t, storage] = pair
    return reads, makes


def _operator_growth(graph: Graph, calls: Sequence[Call | None], task: int, factor: float) -> float:
    number = graph.tasks.call[task]
    new = calls[number] if number >= 0 else None
    if new is None:
        return factor
    old = graph.calls[number]
    return moved(new) / max(moved(old), 1)


def moved(call: Call) -> int:
    """Bytes of what a call reads and writes."""
    return sum(spec.nbytes for spec in (*call.inputs, *call.outputs))
