"""Cost of a capture, the unexplained part of a step, and the effect of a busy machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from slipstream import technique
from slipstream.errors import SlipstreamError
from slipstream.graph import replay
from slipstream.verbs.children import call_in_child
from slipstream.verbs.predicting import predict
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload
from slipstream_bench import models
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged

# Enough operators per step that dispatching them dominates.
_DISPATCH_BOUND = "tiny_language_model"
_EVENTS = 100_000
_BUILDING_STEPS = 24
# A capture counts only if plain steps before and after it agree within the target.
_CALM = 0.03
_MIN_CALM = 3
_QUICK_FAMILIES = ("perceptron", "tiny_language_model")
_WHAT_IFS = ("batch_size:x2", "accumulation:4", "amp:bf16", "fused_optimizer:foreach")
_MEMORY_STEPS = 4


def rows(options: BenchOptions) -> Iterator[Bar]:
    """Yield rows on building, intrusion, load and memory."""
    yield from _building(options)
    yield from _intrusion(options)
    yield from _memory(options)


def _workload(family: str, techniques: str = "") -> Workload:
    found = Workload.parse(f"{Path(models.__file__)}:{family}")
    return found.with_technique(*technique.parse(techniques)) if techniques else found


def _in_child(options: BenchOptions, workload: Workload, task: str, **arguments: Any) -> Any:
    return call_in_child(
        workload,
        f"slipstream_bench.systems.graph.tasks:{task}",
        threads=1,
        report=_report(options, workload),
        **arguments,
    )


def _report(options: BenchOptions, workload: Workload) -> Callable[[str], None]:
    return lambda line: options.progress(f"{workload.name}: {line}")


def _building(options: BenchOptions) -> Iterator[Bar]:
    name = "in-process capture: graph of 100 k events"
    if not options.wants(name):
        return
    options.progress(name)
    workload = _workload(_DISPATCH_BOUND)
    repeats = 5 if options.full else 1
    times = [
        _in_child(options, workload, "build_times", steps=_BUILDING_STEPS) for _ in range(repeats)
    ]
    costs = [run["build_s"] * _EVENTS / run["events"] for run in times]
    torchs = median(run["profiler_s"] * _EVENTS / run["events"] for run in times)
    events, tasks = times[0]["events"], times[0]["tasks"]
    detail = (
        f"CPU time a capture of {_DISPATCH_BOUND} takes between its steps, for 100 k of its "
        f"{events} events ({tasks} tasks), memory and arguments included; "
        f"{min(costs):.2f}-{max(costs):.2f} s; PyTorch's profiler takes another {torchs:.2f} s to "
        "stop; no trace is written as JSON but that of the one step whose arguments are recorded"
    )
    row = at_most(name, median(costs), 1.0, "s", n=repeats, detail=detail)
    if events < _EVENTS:
        row = not_judged(name, "s", row.target, f"only {events} events; {detail}")
    yield row


def _intrusion(options: BenchOptions) -> Iterator[Bar]:
    residual = "calibrated residual, dispatch-bound step"
    cost = "profiler's cost in a step, dispatch-bound"
    load = "predicted step with a busy loop on each core"
    if not any(map(options.wants, (residual, cost, load))):
        return
    options.progress(residual)
    repeats = 7 if options.full else 3
    hogs = (os.cpu_count() or 1) if options.wants(load) else 0
    results = _in_child(
        options,
        _workload(_DISPATCH_BOUND),
        "captures",
        steps=24 if options.full else 9,
        repeats=repeats,
        hogs=hogs,
    )
    idle = [result["idle"] for result in results]
    if options.wants(residual):
        yield _residual(residual, results)
    if options.wants(cost):
        overhead_ns = [capture_["events"] * capture_["per_event_ns"] for capture_ in idle]
        share = [
            100 * t / capture_["step_ns"] for t, capture_ in zip(overhead_ns, idle, strict=True)
        ]
        each = [capture_["per_event_ns"] for capture_ in idle]
        yield Bar(
            cost, median(share), "% of the step", "reported", None, repeats,
            f"no bar; {idle[0]['events']} events per step, {min(each):.0f}-{max(each):.0f} ns "
            "each, subtracted from the tasks",
        )  # fmt: skip
    if options.wants(load):
        yield _under_load(load, results, hogs)


def _residual(name: str, found: list[dict[str, Any]]) -> Bar:
    """Compare replayed steps with plain steps on which no capture was calibrated."""
    calm = [
        result for result in found if max(result["plain_ns"]) / min(result["plain_ns"]) - 1 <= _CALM
    ]
    off = [100 * abs(result["idle"]["step_ns"] / min(result["plain_ns"]) - 1) for result in calm]
    factor = median(100 * abs(result["idle"]["scale"] - 1) for result in found)
    detail = (
        f"against the fastest plain step before and after each capture; the common factor that the "
        f"cost per event leaves is {factor:.1f} %"
    )
    if len(calm) < _MIN_CALM:
        differences = [
            100 * (max(result["plain_ns"]) / min(result["plain_ns"]) - 1) for result in found
        ]
        reason = (
            "contended: plain steps before and after a capture differ by "
            f"{min(differences):.1f} to {max(differences):.1f} %, "
            f"more than 3 % in {len(found) - len(calm)} of {len(found)}; "
        )
        return not_judged(name, "%", "<= 3", reason + detail)
    detail += f"; {min(off):.2f}-{max(off):.2f} %, {len(calm)} of {len(found)} calm enough"
    return at_most(name, median(off), 3, "%", n=len(calm), detail=detail)


def _under_load(name: str, found: list[dict[str, Any]], hogs: int) -> Bar:
    changes, naive = (
        [100 * (result["loaded"][key] / result["idle"][key] - 1) for result in found]
        for key in ("step_ns", "wall_ns")
    )
    detail = (
        f"{hogs} busy processes during every second capture; medians of {len(found)}: "
        f"{min(changes):+.1f} to {max(changes):+.1f} %; the median wall time of plain steps "
        f"changes by {median(naive):+.0f} % ({min(naive):+.0f} to {max(naive):+.0f} %)"
    )
    return at_most(name, abs(median(changes)), 5, "%", n=len(found), detail=detail)


# ---- memory -----------------------------------------------------------------------------------


def _memory(options: BenchOptions) -> Iterator[Bar]:
    """Compare predicted peaks with the allocator's count in another process."""
    as_is, what_if = "predicted peak memory, unmodified", "predicted peak memory, what if"
    families = [family.__name__ for family in models.FAMILIES]
    if not options.full:
        families = [name for name in families if name in _QUICK_FAMILIES]
    errors: dict[str, float] = {}
    edited: dict[str, float] = {}
    reasons: list[str] = []
    for family in families if options.wants(as_is) or options.wants(what_if) else ():
        options.progress(f"memory of {family}")
        try:
            graph = profile(
                _workload(family),
                steps=3,
                threads=1,
                launches=False,
                report=_report(options, _workload(family)),
            )
            true = _peak(options, family)
            errors[family] = _error(replay(graph).peak_bytes, true)
            if not options.wants(what_if):
                continue
            names = _WHAT_IFS if options.full else _WHAT_IFS[:1]
            # As for a user: the workspace of operators is measured first.
            for p in predict(graph, names, report=_report(options, _workload(family))):
                if p.why_not is None:
                    true = _peak(options, family, p.technique)
                    edited[f"{family} {p.technique}"] = _error(p.memory[1], true)
        except SlipstreamError as error:
            reasons.append(f"{family}: {error.what}")
    for bar, limit, found in ((as_is, 2.0, errors), (what_if, 5.0, edited)):
        if not options.wants(bar):
            continue
        if not found or reasons:
            yield not_judged(bar, "%", f"<= {limit:g}", "; ".join(reasons) or "nothing to compare")
            continue
        worst = max(found, key=lambda key: abs(found[key]))
        each = ", ".join(f"{key} {value:+.1f} %" for key, value in found.items())
        detail = f"worst of {len(found)}, {worst}; against the allocator's total: {each}"
        yield at_most(bar, abs(found[worst]), limit, "%", n=len(found), detail=detail)


def _peak(options: BenchOptions, family: str, techniques: str = "") -> int:
    workload = _workload(family, techniques)
    return int(_in_child(options, workload, "allocator_peak", steps=_MEMORY_STEPS)["peak_bytes"])


def _error(predicted: int, true: int) -> float:
    return 100 * (predicted / true - 1)
