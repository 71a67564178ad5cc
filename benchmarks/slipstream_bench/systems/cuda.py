"""``slipstream bench cuda``: steps recorded, predicted and measured on a CUDA device.

Without a CUDA device no row is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from slipstream import technique
from slipstream.graph import Graph, replay
from slipstream.measure.arms import time_function
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload, build_from
from slipstream_bench import cuda_models
from slipstream_bench.harness import on_cuda
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.accuracy.cells import measure_cells

# Techniques whose predictions concern kernels alone.
_TECHNIQUES = ("tf32", "cudnn_benchmark", "cuda_graphs")
_QUICK = ("language_model", "tiny_language_model")
_SIMULATED = 5.0
_WARM, _STEPS = 10, 40
_BUDGET = "10s"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield for each family its simulated step, and a cell per technique."""
    names = [technique.combination_name(technique.parse(text)) for text in _TECHNIQUES]
    for make in cuda_models.FAMILIES:
        family = make.__name__
        bar = f"{family}: simulated step over the measured"
        if not (options.full or family in _QUICK or options.only):
            continue
        requested = [name for name in names if options.wants(f"{family} {name}")]
        if not (requested or options.wants(bar)):
            continue
        if not torch.cuda.is_available():
            yield not_judged(bar, "%", f"<= {_SIMULATED:g}", "no CUDA device")
            continue
        workload = Workload.parse(f"{Path(cuda_models.__file__)}:{family}")
        options.progress(f"{family}: profiling")
        graph = profile(workload, threads=1, report=options.progress)
        if options.wants(bar):
            yield on_cuda(_simulated(bar, graph, make()))
        if requested:
            cells = measure_cells(
                family, workload, requested, _BUDGET, options.progress, widest=math.inf, graph=graph
            )
            yield from (on_cuda(cell.to_row()) for cell in cells)


def _simulated(bar: str, graph: Graph, parts: tuple[Any, ...]) -> Bar:
    """Compare the simulated recorded step with steps of another process that are not recorded."""
    built = build_from(parts, [], 0, bar)
    simulated = replay(graph).step_ns

    def step() -> None:
        built.step()
        torch.cuda.synchronize()

    for _ in range(_WARM):
        step()
    measured = sorted(time_function(step)["wall"] for _ in range(_STEPS))
    error = 100 * abs(simulated / median(measured) - 1)
    detail = (
        f"{simulated / 1e6:.3f} ms simulated; {_STEPS} steps took {measured[0] / 1e6:.3f} to "
        f"{measured[-1] / 1e6:.3f}, {median(measured) / 1e6:.3f} in the median; "
        f"{graph.meta['kernels']} kernels, {graph.meta['kernels_linked']} with their launches; the "
        f"profiler cost {graph.meta['profiler_ns_per_event']:.0f} ns per event"
    )
    return at_most(bar, error, _SIMULATED, "%", n=_STEPS, detail=detail)
