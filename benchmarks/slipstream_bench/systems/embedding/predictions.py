"""Bars on predictions of `tt_embedding` from a dense step, compared with real tensor trains."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from slipstream.capture import CaptureSettings, capture
from slipstream.durations import Durations
from slipstream.graph import Graph, Role, StepPhase
from slipstream.graph.flow import matches
from slipstream.native import why_no_library
from slipstream.technique import Context
from slipstream.techniques.embedding.formats.tt import TTEmbeddingBag
from slipstream.techniques.embedding.kernels.tt import kernels
from slipstream.techniques.embedding.tables import lookups
from slipstream.techniques.embedding.tt_technique import TTEmbeddings
from slipstream.workload import build_from, run_steps
from slipstream_bench.harness import numbered, times_s
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged

_ROWS, _BAGS, _EACH = 200_000, 512, 20
_DIMS, _RANKS = (16, 64, 128), (8, 16, 32, 64)
_BATCHES = 6
_MEDIAN, _WORST, _BYTES = (
    f"tensor train, predictions of 12 steps: {what}"
    for what in ("time, median error", "time, largest error", "bytes of parameters off")
)


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield three rows. Trains are predicted as by `slipstream predict`, then built and timed."""
    if not any(map(options.wants, (_MEDIAN, _WORST, _BYTES))):
        return
    if not kernels():
        yield not_judged(_MEDIAN, "%", "<= 20", why_no_library() or "no kernel runs here")
        return
    options.progress(_MEDIAN)
    errors: dict[str, float] = {}
    bytes_off = 0
    with tempfile.TemporaryDirectory() as folder:
        durations = Durations(threads=1, path=Path(folder) / "durations.db")
        for dim in _DIMS:
            graph = _recorded(dim)
            techniques = [TTEmbeddings(rank) for rank in _RANKS]
            durations.measure(
                [call for settings in techniques for call in settings.required_timings(graph)]
            )
            for technique in techniques:
                after = technique.predict(graph, Context(durations))
                bag = TTEmbeddingBag(_ROWS, dim, (technique.rank,) * 2)
                bytes_off += abs(_parameter_bytes(after) - bag.nbytes)
                predicted_ns, measured_ns = (
                    _look_up_ns(graph, after),
                    _measured_ns(bag, options.full),
                )
                errors[f"{dim} columns, rank {technique.rank}"] = predicted_ns / measured_ns - 1
    off = {name: abs(error) * 100 for name, error in errors.items()}
    worst = max(off, key=lambda name: off[name])
    count = f"{_BAGS * _EACH} uniform ids, forward and backward"
    if options.wants(_MEDIAN):
        middle = statistics.median(off.values())
        detail = ", ".join(f"{name} {error:+.0%}" for name, error in errors.items())
        yield at_most(_MEDIAN, middle, 20.0, "%", n=len(off), detail=f"{count}; {detail}")
    if options.wants(_WORST):
        yield at_most(_WORST, off[worst], 35.0, "%", n=len(off), detail=worst)
    if options.wants(_BYTES):
        yield at_most(_BYTES, bytes_off, 0, "bytes", n=len(off))


def _recorded(dim: int) -> Graph:
    """Record a training step of one dense table."""
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(_ROWS, dim, mode="sum")
    batch = (torch.randint(0, _ROWS, (_BAGS, _EACH)), torch.zeros(_BAGS, dim))
    made = (bag, batch, mse_loss, torch.optim.SGD(bag.parameters(), 1e-6))
    built = build_from(made, (), 0, f"a table of {dim} columns")
    settings = CaptureSettings(warmup=1, steps=3, threads=1, own_process=False)
    graph: Graph = run_steps(built, capture(settings))
    return graph


def _look_up_ns(before: Graph, after: Graph) -> float:
    """Return the predicted time of the look-up with its backward pass, the only edited tasks."""

    def whole(graph: Graph) -> float:
        phase = graph.tasks.phase
        own = (phase == StepPhase.FORWARD) | (phase == StepPhase.BACKWARD)
        return float(graph.tasks.duration_ns[own].sum())

    recorded = sum(
        float(before.tasks.duration_ns[t])
        for match in matches(before, lookups)
        for t in match.tasks
    )
    return whole(after) - whole(before) + recorded


def _parameter_bytes(graph: Graph) -> int:
    return int(graph.memory.nbytes[graph.memory.role == Role.PARAMETER].sum())


def _measured_ns(bag: Any, full: bool) -> float:
    """Return the minimum time of the look-up and its backward pass alone, over several rounds."""
    ids = [torch.randint(0, _ROWS, (_BAGS, _EACH)) for _ in range(_BATCHES)]
    gradient = torch.ones(_BAGS, bag.embedding_dim)
    parameters = list(bag.parameters())

    def step(number: int) -> None:
        torch.autograd.grad(bag(ids[number % _BATCHES]), parameters, gradient)

    # The first round over the batches is not counted.
    taken = times_s(numbered(step), (12 if full else 6) * _BATCHES, settle=_BATCHES)
    return 1e9 * float(taken.reshape(-1, _BATCHES).mean(1).min())
