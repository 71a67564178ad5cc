"""Plan the arena that holds all activations and scratch of a program."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.ship.firmware.planner import Buffer, MemoryPlan, plan_memory
from slipstream.ship.firmware.program import KernelCall, Program

ALIGN = 16
Sizes = NDArray[np.int64]


@dataclass(frozen=True)
class Region:
    """Bytes of the arena and the steps that use them.

    Attributes:
        name: name of the tensor, or of the step whose scratch it is.
        offset, size: bytes.
        first, last: steps.
    """

    name: str
    offset: int
    size: int
    first: int
    last: int


@dataclass(frozen=True)
class Arena:
    """A planned arena.

    Attributes:
        size: bytes.
        tensors: offsets of computed tensors and views, by index of tensor.
        scratch: offsets by index of step; steps without scratch are absent.
        regions: all regions, tensors first.
        plan: result of the planner.
    """

    size: int
    tensors: Mapping[int, int]
    scratch: Mapping[int, int]
    regions: tuple[Region, ...]
    plan: MemoryPlan


def plan_arena(program: Program, *, overlap: bool = True, seconds: float = 1.0) -> Arena:
    """Return the smallest arena found.

    Args:
        overlap: whether an output may overlap an input that its operator reads in the same order.
    """
    disjoint = _arena(program, seconds, overlap=False, merge=False)
    if not overlap:
        return disjoint
    candidates = [_arena(program, seconds, overlap=True, merge=merge) for merge in (True, False)]
    return min([*candidates, disjoint], key=lambda arena: arena.size)


def _arena(program: Program, seconds: float, *, overlap: bool, merge: bool) -> Arena:
    network, steps = program.network, program.steps
    lives = _lives(program)
    groups = _groups(program, lives, merge)
    parts = [
        [_Part(root, network.tensors[root].nbytes, *lives[root]) for root in g] for g in groups
    ]
    place = {root: number for number, group in enumerate(groups) for root in group}
    scratch = {}
    for number, step in enumerate(steps):
        if step.scratch:
            scratch[number] = len(parts)
            parts.append([_Part(-1, step.scratch, number, number)])
    shared: dict[tuple[int, int], int] = {}
    if overlap:
        for number, step in enumerate(steps):
            for root, distance in _ends_here(program, lives, number, step):
                if distance is not None:
                    shared[step.output, root] = distance
    buffers = [
        Buffer(
            max(part.size for part in group), min(part.first for part in group),
            max(part.last for part in group),
        )
        for group in parts
    ]  # fmt: skip
    plan = plan_memory(buffers, align=ALIGN, distances=_distances(parts, shared), seconds=seconds)
    tensors = {
        index: plan.offsets[place[program.root(index)]]
        for index in range(len(network.tensors))
        if program.root(index) in place
    }
    regions = [
        Region(
            network.tensors[root].name, tensors[root], network.tensors[root].nbytes, *lives[root]
        )
        for root in lives
    ]
    regions += [
        Region(f"scratch of step {number}", plan.offsets[at], steps[number].scratch, number, number)
        for number, at in scratch.items()
    ]
    where = {number: plan.offsets[at] for number, at in scratch.items()}
    return Arena(plan.peak, tensors, where, tuple(regions), plan)


def arena_bounds(
    program: Program, sizes: Mapping[int, Sizes], scratch: Sequence[Sizes],
    distances: Sequence[Sequence[Sizes]],
) -> Sizes:  # fmt: skip
    """Return lower bounds of the arenas of networks that differ from `program` in sizes only.

    All sizes are multiples of `ALIGN`.

    Args:
        sizes: bytes by index of tensor, int64 [networks].
        scratch: bytes of each step's scratch.
        distances: as `KernelCall.distances` of each step, in the order of its inputs.
    """
    lives = _lives(program)
    bounds = [
        _bound(program, lives, sizes, scratch, distances, merge=merge) for merge in (True, False)
    ]
    return np.minimum(*bounds)


def _bound(
    program: Program, lives: Mapping[int, tuple[int, int]], sizes: Mapping[int, Sizes],
    scratch: Sequence[Sizes], distances: Sequence[Sequence[Sizes]], *, merge: bool,
) -> Sizes:  # fmt: skip
    """Return `MemoryPlan.bound` of the buffers that `_arena` makes, over all networks."""
    groups = _groups(program, lives, merge)
    shared: dict[tuple[int, int], Sizes] = {}
    for number, step in enumerate(program.steps):
        ending = _ends_here(program, lives, number, step)
        for (root, distance), apart in zip(ending, distances[number], strict=False):
            if distance is not None:
                shared[step.output, root] = apart
    live = [size.copy() for size in scratch]
    spans = [(min(lives[r][0] for r in g), max(lives[r][1] for r in g)) for g in groups]
    whole = [functools.reduce(np.maximum, [sizes[root] for root in group]) for group in groups]
    for (first, last), size in zip(spans, whole, strict=True):
        for at in range(first, last + 1):
            live[at] += size
    for a, b in itertools.combinations(range(len(groups)), 2):
        first, last = max(spans[a][0], spans[b][0]), min(spans[a][1], spans[b][1])
        pairs = [
            (whole[low], needed)
            for low, up in ((a, b), (b, a))
            if first <= last
            and (needed := _needed(groups[low], groups[up], lives, sizes, shared)) is not None
        ]
        if not pairs or all(needed is size for size, needed in pairs):
            continue  # they never overlap
        saved = functools.reduce(np.maximum, [size - np.minimum(size, n) for size, n in pairs])
        for at in range(first, last + 1):
            live[at] -= saved
    return functools.reduce(np.maximum, [*live, *whole])


def _needed(
    low: Sequence[int], up: Sequence[int], lives: Mapping[int, tuple[int, int]],
    sizes: Mapping[int, Sizes], shared: Mapping[tuple[int, int], Sizes],
) -> Sizes | None:  # fmt: skip
    """Return the distance between two groups, as `_distances` does; None if never live together."""
    found = [
        shared.get((a, b), sizes[a])
        for a in low
        for b in up
        if lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1]
    ]
    return functools.reduce(np.maximum, found) if found else None


@dataclass(frozen=True)
class _Part:
    """A tensor in a buffer during some steps; `root` is -1 for scratch."""

    root: int
    size: int
    first: int
    last: int


def _distances(
    parts: list[list[_Part]], shared: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    """Return the minimum distance between starts of buffers, if less than the lower one's size.

    It is the size of the lower buffer's parts that are live with the upper one's, or what an
    operator that reads one and writes the other allows.
    """
    distances = {}
    for a, lower in enumerate(parts):
        for b, upper in enumerate(parts):
            if a == b:
                continue
            needed = [
                shared.get((low.root, up.root), low.size)
                for low in lower
                for up in upper
                if low.first <= up.last and up.first <= low.last
            ]
            if needed:
                distances[a, b] = max(needed)
    return distances


def _lives(program: Program) -> dict[int, tuple[int, int]]:
    """Return first and last step of every tensor that is neither view nor constant."""
    last = len(program.steps) - 1
    lives = {program.root(index): (0, 0) for index in program.network.inputs}
    for number, step in enumerate(program.steps):
        for index in step.inputs:
            root = program.root(index)
            lives[root] = lives[root][0], number
        lives[step.output] = number, number
    for index in program.network.outputs:
        root = program.root(index)
        lives[root] = lives[root][0], max(last, 0)
    return lives


def _ends_here(
    program: Program, lives: Mapping[int, tuple[int, int]], number: int, step: KernelCall
) -> list[tuple[int, int | None]]:
    """Return (root, distance) of a step's inputs that no later step reads."""
    outputs = {program.root(index) for index in program.network.outputs}
    roots = [program.root(index) for index in step.inputs]
    distances = step.distances or (None,) * len(roots)
    return [
        (root, distance)
        for root, distance in zip(roots, distances, strict=True)
        if lives[root][1] == number and root not in outputs and lives[step.output][0] == number
    ]


def _groups(program: Program, lives: Mapping[int, tuple[int, int]], merge: bool) -> list[list[int]]:
    """Return tensors that share an address because operators overwrite their input."""
    groups = {root: [root] for root in lives}
    for number, step in enumerate(program.steps):
        if merge and step.in_place:
            for root, _ in _ends_here(program, lives, number, step)[:1]:
                groups[root].append(step.output)
                groups[step.output] = groups[root]
    return list({id(group): group for group in groups.values()}.values())
