"""The statistic "regions": how long what torch.compile makes of the model takes, piece by piece.

torch.compile cuts a model into regions (one, unless something in it breaks the graph) and makes a
forward and a backward function of each. The compiled model takes its steps in turns with the
eager one, so that both see the same machine; everything is kept at the recorded step's pace.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.compiling import STEPS_PER_TURN, Compiling, compiled_already, nothing
from slipstream.capture.events import StepEvents
from slipstream.capture.modules import ROOT
from slipstream.graph import Graph, StepPhase

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload

_SHORTEST_S, _LONGEST_S = 4.0, 60.0
_MOST_STEPS = 240
# What torch puts around a region, around the parts of a step that it compiled with what calls
# them, and around frames that contain such parts.
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
    """A program (see `slipstream.workload.drive`) that measures compiled regions.

    Args:
        graph: the recorded eager step; times are brought to its pace.
        steps: compiled steps to measure, and as many eager ones; more where steps are short, fewer
            where they are long.

    Returns:
        JSON; where nothing could be compiled, only ``reason`` and ``remedy``, else:

        - ``mode`` of torch.compile, and ``samples`` per step;
        - ``regions``: a list, see `Region.to_json`;
        - ``overhead_ns``: what calling the regions takes: guards, wrappers, autograd;
        - ``covered_ns``, ``covered_calls``: by phase: duration and number of the eager tasks that
          the regions stand for;
        - ``repeats``: see there; more of them after an edit mean that the step passes more often;
        - ``stays``: (module, operator) of forward tasks that still run one by one;
        - ``breaks``: reasons and lines of graph breaks;
        - ``compile_s`` of CPU time, and ``cached`` when torch had compiled the like before;
        - ``eager_ns``, ``compiled_ns``: the least of the paired steps, as measured.
    """
    if built.model is None:
        return nothing("the step hides its model", "return (model, batch, loss, optimizer)")
    if compiled_already(built.model):
        return nothing("the model is compiled already")
    threads = int(graph.meta["threads"])
    with Compiling(built.model, threads, report) as compiling:
        yield from compiling.warm_up()
        if (failure := compiling.why_not()) is not None:
            return failure
        if not compiling.regions:
            return nothing("torch.compile found no region to compile" + compiling.first_break())
        per_second = 1e9 / max(compiling.step_ns, 1)
        eager_ns: list[int] = []
        compiled_ns: list[int] = []
        # Short steps need more of them: beside compiling, these seconds do not count.
        steps = max(min(steps, int(_LONGEST_S / 2 * per_second)), STEPS_PER_TURN)
        steps = max(steps, min(int(_SHORTEST_S / 2 * per_second), _MOST_STEPS))
        while len(compiled_ns) < steps:
            report(f"compiled step {len(compiled_ns) + 1} of {steps}")
            eager_ns += yield from compiling.turn(compiled=False)
            compiled_ns += yield from compiling.turn(compiled=True)
        seen = yield from compiling.profiled()
    if (failure := compiling.why_not()) is not None:
        # Compiled again in a later step, in vain.
        return failure
    meta: Any = graph.meta["step_ns"]
    pace = min(eager_ns) / (meta["cpu_minimum"] if threads == 1 else meta["wall_minimum"])
    measured = [r for r in compiling.regions if len(r.steps_ns) and min(r.steps_ns)]
    if not measured:
        return nothing("the compiled model is never called the same way twice")
    # No step has all of its regions at their least: together they are as long as in the best one.
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
        "repeats": repeats(graph, covered["forward"]),
        "stays": list(map(list, stays)),
        "breaks": compiling.breaks(),
        "compile_s": compiling.compile_s,
        "cached": compiling.cached,
        "eager_ns": min(eager_ns),
        "compiled_ns": min(compiled_ns),
    }


def covered_tasks(graph: Graph, stays: set[tuple[str, str]]) -> dict[str, NDArray[np.int64]]:
    """By phase: the tasks that the compiled regions stand for.

    These are the model's, but for forward tasks whose (module, operator) is in `stays`, their
    backward tasks, and what adds gradients to parameters.
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


def repeats(graph: Graph, tasks: NDArray[np.int64]) -> int:
    """The largest number of `tasks` that share an operator and autograd's number; at least 1."""
    numbered = tasks[graph.tasks.sequence[tasks] >= 0]
    pairs = np.stack([graph.tasks.sequence[numbered], graph.tasks.name[numbered]], axis=1)
    return int(np.unique(pairs, axis=0, return_counts=True)[1].max(initial=1))


def _stays(graph: Graph, seen: StepEvents) -> list[tuple[str, str]]:
    """Which of the model's forward tasks the compiled step `seen` still runs one by one, once each.

    In the order in which they come first.
    """
    forward = np.flatnonzero(graph.tasks.phase == StepPhase.FORWARD)
    names = graph.texts("name", forward)
    left = _outside(seen, set(names))
    pairs = list(zip(graph.texts("module", forward), names, strict=True))
    total: dict[tuple[str, str], int] = {}
    for pair in pairs:
        total[pair] = total.get(pair, 0) + 1
    counts: dict[tuple[str, str], int] = {}
    matcher = difflib.SequenceMatcher(None, names, left, autojunk=False)
    for block in matcher.get_matching_blocks():
        for pair in pairs[block.a : block.a + block.size]:
            counts[pair] = counts.get(pair, 0) + 1
    return [
        pair
        for pair, count in counts.items()
        if pair[0].partition(".")[0] == ROOT and 2 * count >= total[pair]
    ]


def _overhead_ns(graph: Graph, seen: StepEvents) -> float:
    """Of a compiled step: the time in compiled frames, less the regions and what stays eager."""
    eager = set(graph.texts("name"))
    total = 0.0
    # Ends of the outermost frame, and of what was taken off within it.
    frame = taken = compiled = -1
    for name, start, end in zip(seen.names, seen.start_ns, seen.end_ns, strict=True):
        if start >= frame and name.startswith(_FRAMES):
            total += float(end - start)
            frame = int(end)
        elif start < frame and start >= taken:
            if name.startswith(_REGION) or (start >= compiled and name in eager):
                total -= float(end - start)
                taken = int(end)
            elif name.startswith(_COMPILED):
                # What wrappers do with operators of their own is overhead.
                compiled = max(compiled, int(end))
    return max(total, 0.0)


def _outside(seen: StepEvents, names: set[str]) -> list[str]:
    """The outermost operators among `names` that run outside of compiled functions, in order.

    Only those of the forward pass, which ends where autograd's engine starts.
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
