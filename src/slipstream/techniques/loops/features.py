"""Features of scheduled programs: one row of numbers per statement of a loop tree.

They describe what decides the time of a loop nest: its innermost loops, the strides of accesses
along them, cache lines that are fetched from each cache, how sums are accumulated, and operations.
Python visits each loop once; the rest is computed for all rows together.

Source: Wolf and Lam, "A Data Locality Optimizing Algorithm", PLDI 1991 (footprints and reuse).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from slipstream.codegen.ops import OPS
from slipstream.codegen.program import Apply, Expr, Program
from slipstream.codegen.schedule import Loop, Tree
from slipstream.errors import SlipstreamError
from slipstream.graph.call import ITEM_BYTES

Array = np.ndarray[Any, Any]
_DEPTH = 16
_LINE_BYTES = 64
# Line size in bytes, sets and ways: three caches, and two levels of address translation.
_CACHES = ((64, 64, 8), (64, 2048, 8), (64, 16384, 16), (4096, 1, 72), (4096, 1, 3072))
# Rough costs of a line from beyond each of them.
_LINE_CYCLES = (4, 15, 40, 5, 25)
# Compilers completely unroll inner loops of at most 8 iterations.
_MAX_UNROLLED = 8
# Innermost loops that are described one by one.
_INNER = 4
_MAX_LOCAL = 512


@dataclass(frozen=True)
class _Static:
    """Properties of a statement that do not depend on the schedule.

    Attributes:
        axes: position by name.
        factors: elements per step of each axis, by access (groups x axes).
        counts: accesses with these factors, by group; the first group is the write.
        item_bytes: by group.
        numbers: features.
    """

    axes: dict[str, int]
    extents: tuple[int, ...]
    reduced: tuple[bool, ...]
    ordered: tuple[bool, ...]
    factors: Array
    counts: Array
    item_bytes: Array
    numbers: tuple[float, ...]


def _operations(value: Expr) -> list[int]:
    if not isinstance(value, Apply):
        return []
    return [OPS[value.op].flops, *(f for a in value.args for f in _operations(a))]


@lru_cache(maxsize=1024)
def _static(program: Program) -> tuple[_Static, ...]:
    found = []
    total = sum((b.elements or 0) * ITEM_BYTES[b.dtype] for b in program.buffers)
    for number, statement in enumerate(program.statements):
        groups: dict[tuple[str, tuple[tuple[str, int], ...], bool], int] = {}
        for place, access in enumerate(statement.accesses):
            if access.index.through is not None:
                raise SlipstreamError(
                    f"the access to '{access.buffer}' is not affine: it reads its row from "
                    f"'{access.index.through[0]}'",
                    where=f"statement {number} (of {statement.target})",
                    remedy="the cost model needs affine accesses",
                )
            key = (access.buffer, access.index.terms, place == 0)
            groups[key] = groups.get(key, 0) + 1
        axes = {axis: place for place, axis in enumerate(statement.axes)}
        factors = np.zeros((len(groups), len(axes)))
        for row, (_, terms, _) in enumerate(groups):
            for axis, factor in terms:
                if axis in axes:
                    factors[row, axes[axis]] = factor
        kinds = [program.axis[axis].kind for axis in axes]
        costs = _operations(statement.value)
        written = {s.target for s in program.statements[:number]}
        reads = [access.buffer for access in statement.accesses[1:]]
        numbers = (
            len(reads), len(groups), sum(c == 1 for c in costs), sum(c == 4 for c in costs),
            sum(c > 4 for c in costs), statement.target in reads,
            sum(r in written for r in set(reads)), len(program.statements), number,
            math.log2(total), statement.reduce == "max", statement.reduce == "sum",
            program.real == "double",
        )  # fmt: skip
        found.append(_Static(
            axes, tuple(program.extents[a] for a in axes), tuple(k == "reduce" for k in kinds),
            tuple(k == "sequential" for k in kinds), factors,
            np.array(list(groups.values()), float),
            np.array([ITEM_BYTES[program.buffer[b].dtype] for b, _, _ in groups], float),
            tuple(map(float, numbers)),
        ))  # fmt: skip
    return tuple(found)


_STATIC_NAMES = (
    "reads", "groups", "simple_ops", "divisions", "functions", "in_place", "reads_earlier",
    "statements", "number", "program_bytes", "max", "sum", "double",
)  # fmt: skip
_LOOP_NAMES = (
    "trip", "reduced", "ordered", "tile", "vector", "unroll", "shared", "nodes", "partial",
    "skewed", "broadcast", "unit", "near", "far", "write_unit", "write_broadcast",
    "bytes", "lines",
)  # fmt: skip
_NEST_NAMES = (
    "iterations", "depth", "tiles", "fused_loops", "fused_trip", "partial_loops", "skew",
    "sum_mode", "sum_elements", "sum_entries", "sum_trip", "sum_distance",
    *(f"{kind}_{n}" for n in range(1, 6) for kind in ("traffic", "write_traffic", "fits")),
    "all_bytes", "unrolled_body",
    "body_trip", "main_trip", "main_reduced", "main_level", "main_vector", "main_broadcast",
    "main_unit", "main_near", "main_far", "main_write_unit", "main_write_broadcast",
    "main_write_far", "main_page_steps", "body_ops", "conflict_1", "conflict_2",
    "vector_use", "main_vector_use", "fetch_cycles", "compute_cycles", "cycles",
)  # fmt: skip
NAMES = (
    *_STATIC_NAMES,
    *(f"{name}_{n}" for n in range(_INNER) for name in _LOOP_NAMES),
    *_NEST_NAMES,
)
"""Names of the features; loop 0 is the innermost one."""


class _Rows:
    """Loops of all statements of several trees, as arrays that are filled row by row."""

    def __init__(self) -> None:
        self.statics: list[_Static] = []
        self.owner: list[int] = []
        # Ten numbers per loop, innermost first; then (row, level, axis, multiplier).
        self.loops: list[tuple[int, ...]] = []
        self.steps: list[tuple[int, ...]] = []

    def add(self, tree: Tree, owner: int) -> None:
        for number, static in enumerate(_static(tree.program)):
            self._statement(tree, number, tree.path(number), static, owner)

    def _statement(
        self, tree: Tree, number: int, path: Sequence[Loop], static: _Static, owner: int
    ) -> None:
        row, depth = len(self.statics), len(path)
        if depth > _DEPTH:
            raise SlipstreamError(
                f"{depth} nested loops, which the cost model does not support",
                where=f"statement {number}", remedy=f"at most {_DEPTH} loops, tiles included",
            )  # fmt: skip
        self.statics.append(static)
        self.owner.append(owner)
        sizes = {loop.name[:-1]: loop.tile for loop in path if loop.tile}
        levels: dict[str, list[tuple[int, int]]] = {}
        for place, loop in enumerate(path):
            at = static.axes[loop.axes[number]]
            extent, size = static.extents[at], loop.tile
            if size:
                name, trip = loop.name[:-1], -(-extent // size)
            else:
                name, trip = loop.name, min(sizes.get(loop.name, extent), extent)
            level = depth - 1 - place
            self.loops.append((
                row, level, trip, static.reduced[at], static.ordered[at], size > 0, loop.vector,
                loop.unroll, len(loop.axes), len(loop.body), extent % (size or trip) > 0,
            ))  # fmt: skip
            levels.setdefault(name, []).append((level, size or 1))
        for axis, index in tree.domains[number].iterators.items():
            at = static.axes[axis]
            for name, factor in index.terms:
                for level, size in levels.get(name, ()):
                    self.steps.append((row, level, at, factor * size))


def features(trees: Sequence[Tree]) -> tuple[Array, Array]:
    """Return features of statements (rows x ``len(NAMES)``, float32) and the tree of each row.

    Raises:
        SlipstreamError: a statement is in too many loops, or an access is not affine.
    """
    rows = _Rows()
    for owner, tree in enumerate(trees):
        rows.add(tree, owner)
    return _computed(rows).astype(np.float32), np.array(rows.owner)


def _log(values: Any) -> Array:
    logs: Array = np.log2(np.maximum(values, 1e-9))
    return logs


def _accesses(reads: Array, stride: Array, item: Array) -> list[Array]:
    """Return the reads by the distance that they move along a loop, and whether the write moves."""
    step = stride * np.maximum(item, 1)
    near, far = (stride > 1) & (step < _LINE_BYTES), step >= _LINE_BYTES
    by_distance = [(reads * some).sum(1) for some in (stride == 0, stride == 1, near, far)]
    return [*by_distance, stride[:, 0] == 1, stride[:, 0] == 0]


def _computed(rows: _Rows) -> Array:
    count = len(rows.statics)
    width = max(len(s.axes) for s in rows.statics)
    groups = max(len(s.counts) for s in rows.statics)
    loops = np.array(rows.loops)
    table = np.zeros((9, count, _DEPTH))
    table[0] = 1
    for column in range(9):
        table[column, loops[:, 0], loops[:, 1]] = loops[:, 2 + column]
    trip, reduced, ordered, tile, vector, unroll, shared, nodes, partial = table
    exists = np.zeros((count, _DEPTH), bool)
    exists[loops[:, 0], loops[:, 1]] = True
    depth = exists.sum(1)
    steps = np.array(rows.steps)
    moves = np.zeros((count, _DEPTH, width))
    np.add.at(moves, (steps[:, 0], steps[:, 1], steps[:, 2]), steps[:, 3])
    unique = list({id(s): s for s in rows.statics}.values())
    place = {id(s): n for n, s in enumerate(unique)}
    which = np.array([place[id(s)] for s in rows.statics])
    factors = np.zeros((len(unique), groups, width))
    counts, item = np.zeros((len(unique), groups)), np.zeros((len(unique), groups))
    for n, s in enumerate(unique):
        factors[n, : len(s.counts), : len(s.axes)] = s.factors
        counts[n, : len(s.counts)], item[n, : len(s.counts)] = s.counts, s.item_bytes
    counts, item = counts[which], item[which]
    strides = np.abs(factors[which] @ moves.transpose(0, 2, 1))  # rows x groups x levels
    reads = counts.copy()
    reads[:, 0] -= 1

    used = (counts > 0)[:, :, None]
    lines = _lines(strides, trip, item, _LINE_BYTES) * used
    total = _LINE_BYTES * lines.sum(1)
    iterations = trip.prod(1)

    skewed = (moves != 0).sum(2) > 1
    columns: list[Array] = [np.array([s.numbers for s in unique])[which]]
    columns += [
        np.stack([
            _log(trip[:, level]), reduced[:, level], ordered[:, level], tile[:, level],
            vector[:, level], unroll[:, level], shared[:, level], nodes[:, level],
            partial[:, level], skewed[:, level], *_accesses(reads, strides[:, :, level], item),
            _log(total[:, level]),
            _log(lines[:, :, level].sum(1) / np.cumprod(trip, 1)[:, level]),
        ], 1)
        for level in range(_INNER)
    ]  # fmt: skip
    traffic = _traffic(strides, trip, item, used, iterations)
    main = _main(strides, trip, item, reads, reduced, vector, exists, columns[0])
    columns.append(np.stack([
        _log(iterations), depth, tile.sum(1), ((shared > 1) & exists).sum(1),
        _log(np.where(shared > 1, trip, 1).prod(1)), partial.sum(1), skewed.sum(1),
        *_sums(trip, reduced > 0, tile > 0, exists),
        *traffic,
        _log(total[:, -1]), _log(np.where(unroll > 1, np.minimum(unroll, trip), 1).prod(1)),
        *main,
        *_conflicts(strides, trip, item, used),
        *_vector_use(trip, vector, exists),
        *_cycles(traffic, main, columns[0], trip),
    ], 1))  # fmt: skip
    return np.concatenate(columns, 1)


def _cycles(traffic: list[Array], main: list[Array], numbers: Array, trip: Array) -> list[Array]:
    """Return log2 of rough estimates of cycles per iteration: for lines, for operations, both."""
    fetch = sum(cost * 2**lines for cost, lines in zip(_LINE_CYCLES, traffic[::3], strict=True))
    reduced, vector, near, far, write_unit = (main[n] for n in (2, 4, 7, 8, 9))
    reads, _, simple, divisions, functions = numbers[:, :5].T
    work = (reads + 1 + simple + 4 * divisions + 10 * functions) / 2
    wide = (near + far == 0) & ((write_unit > 0) | ((reduced > 0) & (vector > 0)))
    gathered = (vector > 0) | ((reduced == 0) & (write_unit > 0))
    compute = work / np.where(wide, 16, 1) + np.where(gathered, near + far, 0)
    compute += np.where((reduced > 0) & (vector == 0), 3, 0) + 4 / trip[:, 0]
    return [_log(fetch), _log(compute), _log(fetch + compute)]


def _lines(strides: Array, trip: Array, item: Array, line_bytes: int) -> Array:
    """Return the lines that each access touches in the loops up to each level, innermost first."""
    elements = np.cumprod(np.where(strides > 0, trip[:, None], 1), 2)
    span = np.cumsum(strides * (trip[:, None] - 1), 2) + 1
    per_line = np.maximum(line_bytes / np.maximum(item, 1), 1)[:, :, None]
    dense = np.where(
        strides > 0, np.minimum(trip[:, None], np.maximum(per_line / np.maximum(strides, 1), 1)), 1
    )
    lines = np.minimum(elements, span) / np.maximum.accumulate(dense, 2)
    bounded: Array = np.maximum(np.minimum(lines, span / per_line + 1), 1)
    return bounded


def _sets(strides: Array, item: Array, line_bytes: int, sets: int) -> Array:
    """Return how many sets of a cache an access can use, given the common divisor of its steps."""
    steps = np.gcd.accumulate((strides * item[:, :, None]).astype(np.int64), axis=2)
    lines = np.where(steps % line_bytes == 0, steps // line_bytes, 1)
    usable: Array = sets / np.maximum(np.gcd(lines, sets), 1)
    return usable


def _conflicts(strides: Array, trip: Array, item: Array, used: Array) -> list[Array]:
    """Return the greatest pressure on a set in the two innermost loops, for two caches."""
    found = []
    for line, sets, ways in _CACHES[:2]:
        lines = _lines(strides, trip, item, line) * used
        pressure = lines / _sets(strides, item, line, sets) / ways
        found.append(_log(pressure[:, :, 1].max(1)))
    return found


def _long(trip: Array, vector: Array, exists: Array) -> Array:
    """Return the level of the innermost loop that is not unrolled completely."""
    long = (trip > _MAX_UNROLLED) | (vector > 0) | ~exists
    level: Array = np.minimum(long.argmax(1), exists.sum(1) - 1)
    return level


def _vector_use(trip: Array, vector: Array, exists: Array) -> list[Array]:
    """Return the used fraction of vectors of 16 elements in the innermost and the main loop."""
    main = trip[np.arange(len(trip)), _long(trip, vector, exists)]
    return [t / (16 * np.ceil(t / 16)) for t in (trip[:, 0], main)]


def _main(
    strides: Array, trip: Array, item: Array, reads: Array, reduced: Array, vector: Array,
    exists: Array, numbers: Array,
) -> list[Array]:  # fmt: skip
    """Describe the innermost loop that remains when short loops inside are unrolled completely."""
    count = np.arange(len(trip))
    body = np.cumprod(trip, 1)
    level = _long(trip, vector, exists)
    inside = np.where(level > 0, body[count, np.maximum(level - 1, 0)], 1)
    stride = strides[count, :, level]
    step = stride * np.maximum(item, 1)
    return [
        _log(inside), _log(trip[count, level]), reduced[count, level], level, vector[count, level],
        *_accesses(reads, stride, item), step[:, 0] >= _LINE_BYTES,
        (reads * (step >= 4096)).sum(1), _log(inside * (1 + numbers[:, 0] + numbers[:, 2])),
    ]  # fmt: skip


def _sums(trip: Array, reduced: Array, tile: Array, exists: Array) -> list[Array]:
    """Return how the C++ walker accumulates sums: mode, elements, entries and inner iterations."""
    levels = np.arange(_DEPTH)
    outer = np.where(reduced.any(1), _DEPTH - 1 - reduced[:, ::-1].argmax(1), -1)
    inside = levels < outer[:, None]
    free = inside & ~reduced & exists
    elements = np.where(free, trip, 1).prod(1)
    block = np.cumprod(reduced, 1) > 0
    inner = np.where(block, trip, 1).prod(1)
    in_memory = (elements > _MAX_LOCAL) | (free & tile).any(1)
    mode = np.where(outer < 0, 0, np.where(in_memory, 3, np.where(free.any(1), 2, 1)))
    entries = np.where((levels > outer[:, None]), trip, 1).prod(1)
    distance = np.where(np.cumprod(~reduced, 1) > 0, trip, 1).prod(1) * (outer >= 0)
    return [mode, np.log2(elements), np.log2(entries), np.log2(inner), np.log2(1 + distance)]


def _traffic(
    strides: Array, trip: Array, item: Array, used: Array, iterations: Array
) -> list[Array]:
    """Return log2 of the lines fetched per iteration from beyond each cache.

    The loops whose footprint fits into a cache fetch it once. It is fetched again in each iteration
    of the loops around, except for those directly around along which an access does not move.
    """
    found = []
    levels = np.arange(_DEPTH)
    for line, sets, ways in _CACHES:
        lines = _lines(strides, trip, item, line) * used
        # An access that can use only a part of the sets fills the cache earlier.
        filled = (lines * sets / _sets(strides, item, line, sets)).sum(1)
        fits = np.cumprod(filled <= sets * ways, 1).sum(1)
        at = np.maximum(fits - 1, 0)
        once = np.where(
            fits[:, None] > 0, np.take_along_axis(lines, at[:, None, None], 2)[:, :, 0],
            used[:, :, 0],
        )  # fmt: skip
        outside = levels >= fits[:, None]
        moved = np.maximum.accumulate(((strides > 0) & outside[:, None])[:, :, ::-1], 2)[:, :, ::-1]
        again = np.where(moved & outside[:, None], trip[:, None], 1).prod(2)
        fetched = once * again / iterations[:, None]
        found += [_log(fetched.sum(1)), _log(fetched[:, 0]), fits]
    return found
