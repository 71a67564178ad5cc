"""Where the tensors of a program lie: one arena for activations and scratch, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.ship.firmware.planner import Buffer, Plan, plan_memory
from slipstream.ship.firmware.program import Program, Step

ALIGN = 16


@dataclass(frozen=True)
class Region:
    """Bytes of the arena and when they are in use.

    Attributes:
        name: of the tensor, or of the step whose scratch it is.
        size: bytes.
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
        tensors: offsets by index of tensor, those that are computed, views too.
        scratch: offsets by number of step; steps without scratch are left out.
        regions: everything in it, tensors first.
        plan: of the planner.
    """

    size: int
    tensors: Mapping[int, int]
    scratch: Mapping[int, int]
    regions: tuple[Region, ...]
    plan: Plan


def plan_arena(program: Program, *, overlap: bool = True, seconds: float = 1.0) -> Arena:
    """The smallest arena found, with or without tensors that overlap while an operator runs.

    Args:
        overlap: an output may lie on an input that its operator reads in the same order.
    """
    apart = _arena(program, seconds, overlap=False, merge=False)
    if not overlap:
        return apart
    tried = [_arena(program, seconds, overlap=True, merge=merge) for merge in (True, False)]
    return min([*tried, apart], key=lambda arena: arena.size)


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


@dataclass(frozen=True)
class _Part:
    """What a buffer holds for a while; `root` is -1 for scratch."""

    root: int
    size: int
    first: int
    last: int


def _distances(
    parts: list[list[_Part]], shared: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    """How far above the start of one buffer another must begin, where that is less than its size.

    It is what the first holds while both live, or what an operator that reads one and writes the
    other allows.
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
    """First and last step of every tensor that is no view and no constant."""
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
    program: Program, lives: Mapping[int, tuple[int, int]], number: int, step: Step
) -> list[tuple[int, int | None]]:
    """(root, distance) of a step's inputs that nobody needs after it."""
    kept = {program.root(index) for index in program.network.outputs}
    roots = [program.root(index) for index in step.inputs]
    distances = step.distances or (None,) * len(roots)
    return [
        (root, distance)
        for root, distance in zip(roots, distances, strict=True)
        if lives[root][1] == number and root not in kept and lives[step.output][0] == number
    ]


def _groups(program: Program, lives: Mapping[int, tuple[int, int]], merge: bool) -> list[list[int]]:
    """Tensors that begin at one address, in the order they are written in: those an operator writes
    in the place of its input."""
    groups = {root: [root] for root in lives}
    for number, step in enumerate(program.steps):
        if merge and step.in_place:
            for root, _ in _ends_here(program, lives, number, step)[:1]:
                groups[root].append(step.output)
                groups[step.output] = groups[root]
    return list({id(group): group for group in groups.values()}.values())
