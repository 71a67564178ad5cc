"""``slipstream bench lines``: attribution to source lines, and latency of the editor server."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.graph import Attribution, Cost, Graph, StepPhase, attribute, replay
from slipstream.verbs.profiling import profile
from slipstream_bench import models
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.lines.editor import latencies_ms

_MODELS = (
    "conv_net", "vision_transformer", "language_model", "recurrent_network", "recommender",
    "perceptron",
)  # fmt: skip
_QUICK = ("recurrent_network", "recommender", "perceptron")
_STEPS = 4
_EXACT = "lines and rests that add up to step and peak, to the bit"
_TIME = "untracked time of a step, worst model"
_MEMORY = "untracked memory at the peak, worst model"
_BACKWARD = "backward operators with a number that belong to their forward line"
_SLOW = "rank of the line whose backward is slow"
_LATENCY = "answer to an editor while a step is analysed, 99 of 100"
# The line that applies this function costs nothing in the forward pass.
_SLOW_MODEL = """
import torch
from torch import nn


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        for _ in range(200):
            gradient = torch.sin(gradient) + gradient
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        x = torch.relu(self.up(x))
        x = Slow.apply(x)
        return self.down(x)


def make_workload(batch_size=64):
    model = Net()
    batch = torch.randn(batch_size, 256), torch.randn(batch_size, 256)
    return model, batch, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 1e-2)
"""
_APPLIED = "x = Slow.apply(x)"


@dataclass(frozen=True)
class _Case:
    model: str
    graph: Graph
    found: Attribution

    @property
    def exact(self) -> bool:
        total = sum(self.found.parts(), Cost())
        return total.time_ns == self.found.step_ns and total.memory_bytes == self.found.peak_bytes

    @property
    def faults(self) -> float:
        return self.found.page_faults.time_ns / self.found.step_ns

    def backward(self) -> tuple[int, int]:
        """Return operators of the backward pass with autograd's number: those with a line, and
        all."""
        tasks = self.graph.tasks
        numbered = (tasks.phase == StepPhase.BACKWARD) & (tasks.sequence >= 0)
        return int(np.count_nonzero(tasks.source[numbered])), int(numbered.sum())


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows."""
    yield from attribution_bars(options)
    yield from latency_bars(options)


def attribution_bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield rows over six common model families, three of them in a quick run."""
    names = [name for name in (_EXACT, _TIME, _MEMORY, _BACKWARD) if options.wants(name)]
    if names:
        cases = list(_cases(options))
        n = len(cases)
        if _EXACT in names:
            exact = sum(case.exact for case in cases)
            yield Bar(_EXACT, exact, f"of {n}", f"= {n}", exact == n, n)
        if _TIME in names:
            worst = max(cases, key=lambda case: case.found.untracked_time)
            faults = ", ".join(f"{case.model} {case.faults:.1%}" for case in cases)
            yield at_most(
                _TIME, 100 * worst.found.untracked_time, 5.0, "%", n=n,
                detail=f"{worst.model}; page faults, measured per step and not per line, are a "
                f"separate row: {faults}",
            )  # fmt: skip
        if _MEMORY in names:
            worst = max(cases, key=lambda case: case.found.untracked_memory)
            share = 100 * worst.found.untracked_memory
            yield at_most(_MEMORY, share, 2.0, "%", n=n, detail=worst.model)
        if _BACKWARD in names:
            counts = [case.backward() for case in cases]
            attributed, all_ = sum(a for a, _ in counts), sum(b for _, b in counts)
            yield at_least(
                _BACKWARD,
                100 * attributed / all_,
                100.0,
                "%",
                n=n,
                detail=f"{attributed} of {all_}",
            )
    if options.wants(_SLOW):
        options.progress(_SLOW)
        with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
            path = Path(folder) / "slow.py"
            path.write_text(_SLOW_MODEL)
            graph = profile(f"{path}:make_workload", steps=_STEPS, threads=1)
        line = 1 + next(
            number for number, text in enumerate(_SLOW_MODEL.split("\n")) if _APPLIED in text
        )
        ranked = [line_.number for line_ in attribute(replay(graph)).lines]
        rank = 1 + ranked.index(line) if line in ranked else len(ranked) + 1
        yield Bar(_SLOW, rank, "", "= 1", rank == 1, 1, "a custom autograd.Function, by time")


def latency_bars(options: BenchOptions) -> Iterator[Bar]:
    """Time requests over stdin and stdout from the server's start until techniques are
    simulated."""
    if not options.wants(_LATENCY):
        return
    options.progress(_LATENCY)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        path = models_in(folder)
        latencies = latencies_ms(path, "tiny_language_model")
    if not latencies:
        yield not_judged(_LATENCY, "ms", "<= 20", "the analysis failed")
        return
    yield at_most(
        _LATENCY, float(np.percentile(latencies, 99)), 20.0, "ms", n=len(latencies),
        detail=f"code lens, hints and hover alternately; median {np.median(latencies):.2f} ms, "
        f"longest {max(latencies):.1f} ms",
    )  # fmt: skip


def _cases(options: BenchOptions) -> Iterator[_Case]:
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        path = models_in(folder)
        for name in _MODELS if options.full else _QUICK:
            options.progress(f"attribution: {name}")
            graph = profile(f"{path}:{name}", steps=_STEPS, threads=1)
            yield _Case(name, graph, attribute(replay(graph)))


def models_in(folder: str) -> Path:
    """Copy our models to a folder, since lines of an installed package do not count as a user's."""
    path = Path(folder) / "models.py"
    shutil.copyfile(models.__file__, path)
    return path
