"""CUDA graphs: the kernels of a pass, captured once and launched together.

Source: CUDA graphs; ``torch.cuda.make_graphed_callables``. Host work and launches are removed and
kernels are unchanged: the gain is the time that the device waits for the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import common_spread
from slipstream.errors import WorkloadError
from slipstream.graph import (
    Dependency,
    Edges,
    Editor,
    Graph,
    Kind,
    StepPhase,
    StringTable,
    replace_tasks,
    replay,
)
from slipstream.provenance import Provenance
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.techniques.gpu import need_gpu, not_on_gpu
from slipstream.workload import BuiltWorkload, Workload

_LAUNCH = "cudaGraphLaunch"
# With fewer launches, a graph saves no more than its replay costs, which copies inputs.
_MIN_LAUNCHES = 10
# Added to the launch of a graph, per kernel.
_ASSUMED_NS_PER_KERNEL = 200.0
_SPREAD = 0.5
# Uncertain share of the gain, because only a run shows whether a stretch can be captured.
_UNCERTAIN_SHARE = 0.25
_PASSES = (StepPhase.FORWARD, StepPhase.BACKWARD)


@dataclass(frozen=True)
class CudaGraphs(TechniqueSettings):
    """Replay forward and backward from CUDA graphs; the optimizer's step is unchanged."""

    name: ClassVar[str] = "cuda_graphs"
    traits: ClassVar[Traits] = Traits(stage=Stage.COMPILE + 1, kernels_only=True)
    effect: ClassVar[Quality] = Quality(QualityKind.EXACT, "the same kernels on the same numbers")

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why no stretch of the step can be captured; None if one can."""
        reason = not_on_gpu(graph, "CUDA graphs exist only on NVIDIA GPUs")
        if reason is not None or _stretches(graph):
            return reason
        if any(name == _LAUNCH for name in graph.texts("name")):
            return "everything that can be captured is already launched from CUDA graphs"
        waits = int((graph.tasks.kind == Kind.WAIT).sum())
        return (
            f"no pass has {_MIN_LAUNCHES} consecutive launches that can be captured; "
            f"the step waits for the GPU {waits} times (.item(), .cpu(), print)"
        )

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Replace each stretch that can be captured by a launch, on which its kernels depend."""
        # Edges are not bridged task by task, because each stretch is contracted to one task.
        edit = Editor(replace(graph, edges=Edges.none()), str(self))
        stretches = _stretches(graph)
        owner = np.arange(len(graph))
        launched = 0
        for first, removed, launches in stretches:
            launched += launches
            launch_ns = float(graph.tasks.duration_ns[first])
            edit.set_duration(
                first,
                launch_ns + launches * _ASSUMED_NS_PER_KERNEL,
                Provenance.ASSUMED,
                spread=_SPREAD,
            )
            for task in removed:
                edit.remove(task)
            owner[removed] = first
        waits = int((graph.tasks.kind == Kind.WAIT).sum())
        edited = edit.apply(
            f"{launched} launches in {len(stretches)} graphs"
            + (f", around {waits} calls that wait for the GPU" if waits else "")
        )
        strings = StringTable(edited.strings)
        name, gap_ns = edited.tasks.name.copy(), edited.tasks.gap_ns.copy()
        place = np.cumsum(owner == np.arange(len(graph))) - 1
        for first, removed, _ in stretches:
            name[place[first]] = strings.add(_LAUNCH)
            # Host work after the last launch is not captured.
            gap_ns[place[first]] = graph.tasks.gap_ns[removed[-1]]
        renamed = replace_tasks(edited, name=name, gap_ns=gap_ns)
        edges = _contracted(graph.edges, owner, place)
        after = replace(renamed, strings=strings.freeze(), edges=edges)
        return _uncertain(graph, after, place[[first for first, _, _ in stretches]])

    def apply(self, built: BuiltWorkload) -> None:
        """Capture and replay the model's forward and backward.

        Raises:
            WorkloadError: there is no NVIDIA GPU, the step hides its model, the inputs are not
                positional, or the model cannot be captured.
        """
        import torch

        need_gpu(built, self.name)
        inputs = _inputs(built)
        try:
            torch.cuda.make_graphed_callables(built.model, inputs)
        except RuntimeError as error:
            raise WorkloadError(
                f"the model cannot be captured as a whole: {str(error).splitlines()[0]}",
                remedy="a pass that waits for the GPU (.item(), .cpu(), print) ends a capture; "
                "capture the parts between with torch.cuda.make_graphed_callables",
            ) from error

    def code(self, workload: Workload) -> CodeChange | None:
        """Return a manual step, because it needs inputs of the shape of all batches."""
        return CodeChange(
            "",
            "add by hand, with the inputs of a batch on the GPU:\n"
            "    model = torch.cuda.make_graphed_callables(model, (inputs,))",
        )


def _stretches(graph: Graph) -> list[tuple[int, list[int], int]]:
    """Return the first launch, removed tasks and number of launches of each capturable stretch.

    A stretch is within a pass on a host thread. It ends at waits for the device or another thread,
    copies to or from the host, and communication.
    """
    tasks = graph.tasks
    device = np.isin(tasks.kind, (Kind.KERNEL, Kind.COPY, Kind.COMMUNICATION))
    links = graph.edges.kind == Dependency.LAUNCH
    resumed = graph.edges.kind == Dependency.THREAD_TO_THREAD
    resumes = set(graph.edges.target[resumed].tolist())
    launched: dict[int, list[int]] = {}
    for source, target in zip(
        graph.edges.source[links].tolist(), graph.edges.target[links].tolist(), strict=True
    ):
        launched.setdefault(source, []).append(target)
    stretches = []
    for lane in np.unique(tasks.lane[~device]):
        stretch: list[int] = []
        launches: list[int] = []
        for task in [*np.flatnonzero(tasks.lane == lane).tolist(), -1]:
            ends = task < 0 or _ends(graph, task, launched.get(task, []))
            moves = bool(stretch) and task >= 0 and tasks.phase[task] != tasks.phase[stretch[0]]
            if (ends or moves or task in resumes) and stretch:
                if len(launches) >= _MIN_LAUNCHES:
                    removed = [other for other in stretch if launches[0] < other <= launches[-1]]
                    stretches.append((launches[0], removed, len(launches)))
                stretch, launches = [], []
            if not ends:
                stretch.append(task)
                if task in launched:
                    launches.append(task)
    return stretches


def _uncertain(before: Graph, after: Graph, launches: NDArray[np.int64]) -> Graph:
    """Return `after` with a share of the gain as the uncertainty of the graphs' launches."""
    gain = max(replay(before).step_ns - replay(after).step_ns, 0.0)
    launch_ns = float(after.tasks.duration_ns[launches].sum())
    spread = after.tasks.spread.copy()
    spread[launches] = np.maximum(
        spread[launches],
        common_spread(after, launches.tolist(), _UNCERTAIN_SHARE * gain / max(launch_ns, 1.0)),
    )
    return replace_tasks(after, spread=spread)


def _contracted(edges: Edges, owner: NDArray[np.int64], place: NDArray[np.int64]) -> Edges:
    """Return the edges with each task replaced by its `owner`, renumbered by `place`.

    Launches no longer wait for queue space behind kernels of the same stretch.
    """
    source, target = owner[edges.source], owner[edges.target]
    launches = edges.kind == Dependency.LAUNCH
    launcher = np.full(len(owner), -1)
    launcher[edges.target[launches]] = source[launches]
    merged = (target != edges.target) | np.isin(target, owner[owner != np.arange(len(owner))])
    keep = (source != target) & ~(merged & (launcher[edges.source] == target))
    return replace(
        edges.take(np.flatnonzero(keep)),
        source=place[source[keep]].astype(np.int32),
        target=place[target[keep]].astype(np.int32),
    )


def _ends(graph: Graph, task: int, launched: Sequence[int]) -> bool:
    """Whether `task` cannot be part of a capture."""
    tasks = graph.tasks
    if tasks.phase[task] not in _PASSES or tasks.kind[task] == Kind.WAIT:
        return True
    if graph.task(task).name == _LAUNCH:
        return True
    views = map(graph.task, launched)
    return any(
        view.kind == Kind.COMMUNICATION or view.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))
        for view in views
    )


def _inputs(built: BuiltWorkload) -> tuple[Any, ...]:
    """Return the model's positional inputs.

    Raises:
        WorkloadError: the inputs are unknown or not positional.
    """
    batch = built.batch
    if built.model is None or batch is None or isinstance(batch, Mapping):
        raise WorkloadError(
            "cuda_graphs needs the model and its positional inputs",
            remedy="return (model, (inputs, targets), loss, optimizer)",
        )
    if built.loss is not None and isinstance(batch, (tuple, list)) and len(batch) == 2:
        batch = batch[0]
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
