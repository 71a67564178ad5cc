"""``slipstream bench movement``: exact bytes, savings of regions, and valid limits."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator

import slipstream as ss
from slipstream.durations import Durations
from slipstream.durations.movement import (
    Moved,
    OperatorClass,
    analyze,
    find_regions,
    movement,
)
from slipstream.durations.peaks import peaks_of, probes
from slipstream.graph import Graph
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most
from slipstream_bench.systems.lines.bars import models_in
from slipstream_bench.systems.movement.counted import cases
from slipstream_bench.systems.movement.layers import LayerBytes, traced_layer
from slipstream_bench.systems.movement.recomputation import with_recomputation

_BATCH, _LENGTH, _WIDTH, _HEADS = 8, 512, 1024, 16
_SIZE = f"BERT-large layer, {_BATCH} x {_LENGTH}, 2-byte numbers, 1-byte masks"
_MEASURED = 50
# Noise of a micro-benchmark; an operator that beats the limit by more shows a wrong limit.
_ABOVE = 1.05


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows; quick and full are the same, two minutes."""
    bar = "operators whose bytes equal counted loads and stores"
    if options.wants(bar):
        every = cases()
        agree = sum(case.agrees() for case in every)
        detail = "loops that record every address and compute the same as torch"
        unit = f"of {len(every)}"
        yield at_least(bar, agree, len(every), unit, n=len(every), detail=detail)
    yield from _layer_rows(options)
    yield from _recorded_rows(options)


def _layer_rows(options: BenchOptions) -> Iterator[Bar]:
    names = (
        "whole layer, bytes by class against the formula", "fewer bytes, fused",
        "fewer bytes, fused with 1-bit masks", "fewer bytes, fused and computed again",
        "share of arithmetic: contraction", "share of arithmetic: element-wise",
    )  # fmt: skip
    if not any(options.wants(name) for name in names):
        return
    options.progress("tracing a layer")
    layer = traced_layer(_BATCH, _LENGTH, _WIDTH, _HEADS)
    plain, fused = layer.rows(fused=False), layer.rows(fused=True)
    moved, needed = _bytes(plain), sum(row.needed_bytes for row in fused)
    if options.wants(names[0]):
        traced, hand = _by_class(plain), _formula()
        detail = ", ".join(f"{kind.value} {traced[kind] / 1e6:.1f} MB" for kind in hand)
        differing = sum(abs(traced[kind] - hand[kind]) for kind in hand)
        yield at_most(names[0], differing, 0, "bytes", n=len(plain), detail=f"{_SIZE}: {detail}")
    detail = f"{_SIZE}: {moved / 1e6:.0f} MB by operators, {{:.0f}} MB in {{}} regions"
    count = len({row.region for row in fused})
    if options.wants(names[1]):
        yield at_least(names[1], 100 * (1 - needed / moved), 27, "%",
                       detail=detail.format(needed / 1e6, count))  # fmt: skip
    if options.wants(names[2]):
        bits = sum(row.needed_bytes for row in layer.with_mask_bits().rows(fused=True))
        yield at_least(names[2], 100 * (1 - bits / moved), 31, "%",
                       detail=detail.format(bits / 1e6, count))  # fmt: skip
    if options.wants(names[3]):
        again = with_recomputation(layer.operations, layer.lasting)
        rows = analyze(again, layer.lasting, find_regions(layer.operations))
        fewest = sum(row.needed_bytes for row in rows)
        yield at_least(names[3], 100 * (1 - fewest / moved), 35, "%",
                       detail=detail.format(fewest / 1e6, count)
                       + "; masks drawn again, probabilities computed again")  # fmt: skip
    yield from _shares(options, names[4:], plain)


def _shares(options: BenchOptions, names: tuple[str, ...], rows: list[Moved]) -> Iterator[Bar]:
    total = sum(row.operations for row in rows)
    shares = {
        kind: 100 * sum(row.operations for row in rows if row.kind is kind) / total
        for kind in OperatorClass
    }
    if options.wants(names[0]):
        yield at_least(names[0], shares[OperatorClass.CONTRACTION], 99.7, "%", n=len(rows))
    if options.wants(names[1]):
        yield at_most(
            names[1], shares[OperatorClass.ELEMENTWISE], 0.05, "%", n=len(rows),
            detail="one operation for each element of scaling, dropout, GELU and residual sums",
        )  # fmt: skip


def _formula() -> dict[OperatorClass, int]:
    """Return bytes of the layer's step by class, derived by hand from its definition."""
    n, d, h, two = _BATCH * _LENGTH, _WIDTH, 4 * _WIDTH, 2
    x, hidden = n * d * two, n * h * two
    square, up = d * d * two, d * h * two
    scores = _BATCH * _HEADS * _LENGTH * _LENGTH * two
    d_bias, h_bias, stats = d * two, h * two, n * 4
    mask = scores // 2, x // 2, hidden // 2
    products = 4 * (2 * x + square + d_bias) + 2 * (x + hidden + up) + h_bias + d_bias
    products += 2 * (2 * x + scores)
    back = 8 * (2 * x + square) + 4 * (x + hidden + up) + 4 * (2 * x + scores)
    norms = 2 * scores + 2 * (2 * x + 2 * d_bias + 2 * stats)
    norms += 2 * (3 * x + 2 * stats + 3 * d_bias) + 3 * scores
    norms += 5 * (x + d_bias) + (hidden + h_bias)
    maps = 4 * 2 * x + (2 * scores) + (2 * scores + mask[0]) + 2 * (2 * x + mask[1]) + 2 * 3 * x
    maps += 2 * hidden + (2 * hidden + mask[2])
    maps += 2 * (2 * x + mask[1]) + (2 * hidden + mask[2]) + 3 * hidden + (2 * scores + mask[0])
    maps += 2 * scores + 4 * 2 * x + 4 * 3 * x
    return {
        OperatorClass.CONTRACTION: products + back,
        OperatorClass.NORMALIZATION: norms,
        OperatorClass.ELEMENTWISE: maps,
    }


def _by_class(rows: list[Moved]) -> Counter[OperatorClass]:
    found: Counter[OperatorClass] = Counter()
    for row in rows:
        found[row.kind] += row.moved_bytes
    return found


def _bytes(rows: list[Moved]) -> int:
    return sum(row.moved_bytes for row in rows)


def _recorded_rows(options: BenchOptions) -> Iterator[Bar]:
    attributed, honest = (
        "bytes with a class, a phase and a source line",
        "operators above the limit",
    )
    if not (options.wants(attributed) or options.wants(honest)):
        return
    options.progress("recording a step")
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        graph = ss.profile(f"{models_in(folder)}:language_model")
    rows = movement(graph)
    if options.wants(attributed):
        attributed_bytes = sum(row.moved_bytes for row in rows if _attributed(graph, row))
        share = 100 * attributed_bytes / _bytes(rows)
        yield at_least(attributed, share, 100, "%", n=len(rows),
                       detail=f"language_model: {_bytes(rows) / 1e6:.0f} MB of a step")  # fmt: skip
    if options.wants(honest):
        options.progress(honest)
        yield _honest(honest, graph, rows)


def _attributed(graph: Graph, row: Moved) -> bool:
    task = graph.task(row.task)
    return bool(task.source) and task.phase.name != "OTHER"


def _honest(bar: str, graph: Graph, rows: list[Moved]) -> Bar:
    durations = Durations()
    calls = {graph.task(row.task).known_call.key: row for row in rows if row.moved_bytes > 1 << 16}
    chosen = list(calls.values())[:_MEASURED]
    dtypes = frozenset({"float32"})
    durations.measure([*probes(dtypes), *(graph.task(row.task).known_call for row in chosen)])
    limits = peaks_of(durations, dtypes)
    assert limits is not None
    above, judged = [], 0
    for row in chosen:
        call = graph.task(row.task).known_call
        answer = durations.lookup(call)
        if answer is None:
            continue
        judged += 1
        if limits.min_ns(row, call) > _ABOVE * answer.nanoseconds:
            above.append(call.name)
    detail = f"of {judged}; " + (", ".join(above) or "the nearest are below it")
    return at_most(bar, len(above), 0, "operators", n=judged, detail=detail)


__all__ = ["LayerBytes", "bars"]
