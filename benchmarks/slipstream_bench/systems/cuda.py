"""``slipstream bench cuda``: steps recorded on a CUDA device, predicted and measured there.

Needs one; elsewhere its rows say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from slipstream import technique
from slipstream.graph import replay
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload
from slipstream_bench import cuda_models
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged, on_cuda
from slipstream_bench.systems.accuracy.cells import measure_cells

# What is predicted of kernels alone.
_TECHNIQUES = ("tf32", "cudnn_benchmark", "cuda_graphs")
_QUICK = ("language_model", "tiny_language_model")
_SIMULATED = 5.0


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Of each family: its step as simulated, and a cell a technique."""
    names = [technique.combination_name(technique.parse(text)) for text in _TECHNIQUES]
    for make in cuda_models.FAMILIES:
        family = make.__name__
        bar = f"{family}: simulated step over the measured"
        if not (options.full or family in _QUICK or options.only):
            continue
        workload = Workload.parse(f"{Path(cuda_models.__file__)}:{family}")
        if not torch.cuda.is_available():
            if options.wants(bar):
                yield not_judged(bar, "%", f"<= {_SIMULATED:g}", "no CUDA device")
            continue
        if options.wants(bar):
            options.progress(bar)
            yield on_cuda(_simulated(bar, workload))
        asked = [name for name in names if options.wants(f"{family} {name}")]
        if asked:
            budget = "20s" if options.full else "8s"
            for cell in measure_cells(
                family, workload, asked, budget, options.progress, widest=math.inf
            ):
                yield on_cuda(cell.to_row())


def _simulated(bar: str, workload: Workload) -> Bar:
    graph = profile(workload)
    step_ns = graph.meta["step_ns"]
    simulated, measured = replay(graph).step_ns, float(step_ns["wall_minimum"])
    error = 100 * abs(simulated / measured - 1)
    detail = (
        f"{graph.meta['device_name']}: {simulated / 1e6:.3f} ms, steps measured took "
        f"{measured / 1e6:.3f} to {step_ns['wall_median'] / 1e6:.3f}; {graph.meta['kernels']} "
        f"kernels, {graph.meta['kernels_linked']} with their launches"
    )
    return at_most(bar, error, _SIMULATED, "%", detail=detail)
