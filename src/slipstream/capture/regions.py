"""The statistic "regions": times of the model's regions under torch.compile.

torch.compile splits a model into regions (one, without graph breaks) and compiles a forward and a
backward function of each. Steps of the compiled and the eager model alternate, so that both run
under the same conditions; times are scaled to the pace of the recorded step.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.compiling import STEPS_PER_TURN, Compiling, compiled_already, no_regions
from slipstream.capture.events import StepEvents
from slipstream.capture.modules import ROOT
from slipstream.graph import Graph, StepPhase

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload

_MIN_S, _MAX_S = 4.0, 60.0
_MAX_STEPS = 240
# Torch's annotations of a region, of frames that contain compiled parts, and of compiled functions
# with their wrappers.
_REGION = "## Call CompiledFxGraph"
_FRAMES = (
    "TorchDynamo Cache Lookup", "Torch-Compiled Region",
    "autograd::engine::evaluate_function: CompiledFunctionBackward",
)  # fmt: skip
_COMPILED = ("CompiledFunction", _REGION, "AOTDispatcher Runtime Wrapper")
_ACCUMULATES = "AccumulateGrad"


def record_regions(
    built: BuiltWorkload, graph: Graph, steps: int, report: Callable[[str], None]
) -> Generator[None, Any, dict[str, Any]]:
    """Measure compiled regions, as a program (see `slipstream.workload.drive`).

    Args:
        graph: The recorded eager step; times are scaled to its pace.
        steps: Number of compiled and of eager steps; more for short steps, fewer for long ones.

    Returns:
        JSON; only ``reason`` and ``remedy`` without compiled regions, else:

        - ``mode`` of torch.compile, and ``samples`` per step;
        - ``regions``: a list, see `Region.to_json`;
        - ``overhead_ns``: time to call the regions: guards, wrappers, autograd;
        - ``covered_ns``, ``covered_calls``: duration and number of the eager tasks that the
          regions replace, by phase;
        - ``max_repeats``: see `max_repeats`; a larger value after an edit: more passes per step;
        - ``stays``: (module, operator) of forward tasks that still run eagerly;
        - ``breaks``: reasons and lines of graph breaks;
        - ``compile_s`` of CPU time, and ``cached`` if torch found the code in its cache;
        - ``eager_ns``, ``compiled_ns``: minimum of the paired steps, as measured.
    """
    if built.model is None:
        return no_regions("the step hides its model", "return (model, batch, loss, optimizer)")
    if compiled_already(built.model):
        return no_regions("the model is already compiled")
    threads = int(graph.meta["threads"])
    with Compiling(built.model, threads, report) as compiling:
        yield from compiling.warm_up()
        if (failure := compiling.why_not()) is not None:
            return failure
        if not compiling.regions:
            return no_regions("torch.compile found no region to compile" + compiling.first_break())
        per_second = 1e9 / max(compiling.step_ns, 1)
        eager_ns: list[int] = []
        compiled_ns: list[int] = []
        # Short steps need more repetitions; compiling takes longer than these seconds.
        steps = max(min(steps, int(_MAX_S / 2 * per_second)), STEPS_PER_TURN)
        steps = max(steps, min(int(_MIN_S / 2 * per_second), _MAX_STEPS))
        while len(compiled_ns) < steps:
            report(f"compiled step {len(compiled_ns) + 1} of {steps}")
            eager_ns += yield from compiling.turn(compiled=False)
            compiled_ns += yield from compiling.turn(compiled=True)
        seen = yield from compiling.profiled()
    if (failure := compiling.why_not()) is not None:
        # Recompiling in a later step failed.
        return failure
    meta: Any = graph.meta["step_ns"]
    pace = min(eager_ns) / (meta["cpu_minimum"] if threads == 1 else meta["wall_minimum"])
    measured = [r for r in compiling.regions if len(r.steps_ns) and min(r.steps_ns)]
    if not measured:
        return no_regions("no region ran in every step of the compiled model")
    # No step has all regions at their minimum: scale them to the step with the minimum sum.
    together = min(map(sum, zip(*(r.steps_ns for r in measured), strict=True)))
    apart = sum(min(r.steps_ns) for r in measured)
    stays = _stays(graph, seen[0])
    covered = covered_tasks(graph, set(stays))
    return {
        "mode": "default",
        "samples": graph.samples,
        "regions": [region.to_json(together / apart / pace) for region in measured],
        "overhead_ns": min(_overhead_ns(graph, step) for step in seen) / pace,
        "covered_ns": {
            phase: float(graph.tasks.duration_ns[tasks].sum()) for phase, tasks in covered.items()
        },
        "covered_calls": {phase: len(tasks) for phase, tasks in covered.items()},
        "repeats": max_repeats(graph, covered["forward"]),
        "stays": list(map(list, stays)),
        "breaks": compiling.breaks(),
        "compile_s": compiling.compile_s,
        "cached": compiling.cached,
        "eager_ns": min(eager_ns),
        "compiled_ns": min(compiled_ns),
    }


def covered_tasks(graph: Graph, stays: set[tuple[str, str]]) -> dict[str, NDArray[np.int64]]:
    """Return the tasks that the compiled regions replace, by phase.

    These are the model's, except forward tasks whose (module, operator) is in `stays`, their
    backward tasks, and the accumulation of parameters' gradients.
    """
    tasks = graph.tasks
    module = graph.texts("module")
    inside = np.array([m.partition(".")[0] == ROOT for m in module], bool)
    as_before = np.array(
        [pair in stays for pair in zip(module, graph.texts("name"), strict=True)], bool
    )
    accumulates = np.array([_ACCUMULATES in text for text in graph.strings], bool)[tasks.scope]
    forward = inside & (tasks.phase == StepPhase.FORWARD)
    numbers = tasks.sequence[forward & as_before]
    eager_again = np.isin(tasks.sequence, numbers[numbers >= 0])
    backward = inside & (tasks.phase == StepPhase.BACKWARD) & ~accumulates & ~eager_again
    return {
        "forward": np.flatnonzero(forward & ~as_before),
        "backward": np.flatnonzero(backward),
    }


def max_repeats(graph: Graph, tasks: NDArray[np.int64]) -> int:
    """Return the maximum number of `tasks` with the same operator and sequence number, >= 1."""
    numbered = tasks[graph.tasks.sequence[tasks] >= 0]
    pairs = np.stack([graph.tasks.sequence[numbered], graph.tasks.name[numbered]], axis=1)
    return int(np.unique(pairs, axis=0, return_counts=True)[1].max(initial=1))


def _stays(graph: Graph, seen: StepEvents) -> list[tuple[str, str]]:
    """Return the model's forward tasks that the compiled step `seen` runs eagerly, distinct."""
    forward = np.flatnonzero(graph.tasks.phase == StepPhase.FORWARD)
    names = graph.texts("name", forward)
    eager = _outside(seen, set(names))
    pairs = list(zip(graph.texts("module", forward), names, strict=True))
    total: dict[tuple[str, str], int] = {}
    for pair in pairs:
        total[pair] = total.get(pair, 0) + 1
    counts: dict[tuple[str, str], int] = {}
    matcher = difflib.SequenceMatcher(None, names, eager, autojunk=False)
    for block in matcher.get_matching_blocks():
        for pair in pairs[block.a : block.a + block.size]:
            counts[pair] = counts.get(pair, 0) + 1
    return [
        pair
        for pair, count in counts.items()
        if pair[0].partition(".")[0] == ROOT and 2 * count >= total[pair]
    ]


def _overhead_ns(graph: Graph, seen: StepEvents) -> float:
    """Return a compiled step's time in compiled frames, without regions and eager operators."""
    eager = set(graph.texts("name"))
    total = 0.0
    # Ends of the outermost frame, of the last subtracted event, and of compiled functions.
    frame = subtracted = compiled = -1
    for name, start, end in zip(seen.names, seen.start_ns, seen.end_ns, strict=True):
        if start >= frame and name.startswith(_FRAMES):
            total += float(end - start)
            frame = int(end)
        elif start < frame and start >= subtracted:
            if name.startswith(_REGION) or (start >= compiled and name in eager):
                total -= float(end - start)
                subtracted = int(end)
            elif name.startswith(_COMPILED):
                # Operators that wrappers call are overhead.
                compiled = max(compiled, int(end))
    return max(total, 0.0)


def _outside(seen: StepEvents, names: set[str]) -> list[str]:
    """Return the outermost operators among `names` outside of compiled functions, in order.

    Only the forward pass counts, which ends where autograd's engine starts.
    """
    operators: list[str] = []
    until = -1
    for name, start, end in zip(seen.names, seen.start_ns, seen.end_ns, strict=True):
        if start < until:
            continue
        if name.startswith("autograd::engine"):
            break
        if name.startswith(_COMPILED):
            until = int(end)
        elif name in names:
            operators.append(name)
            until = int(end)
    return operators
