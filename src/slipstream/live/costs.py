"""Costs of a step per source line and module, which add up exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.graph import Attribution, Cost, Graph, Timeline, attribute, replay

_MAX_MODULES, _MAX_CALLERS = 8, 4


class _Phases:
    """Time by phase and memory at the peak, of a line or a module."""

    forward_ns: float
    backward_ns: float
    update_ns: float
    other_ns: float
    peak_bytes: int

    @property
    def total_ns(self) -> float:
        """Time of all phases."""
        return self.forward_ns + self.backward_ns + self.update_ns + self.other_ns


@dataclass(frozen=True)
class LineCost(_Phases):
    """Cost of one line of the user's source in one step.

    Attributes:
        path: absolute path of the file; empty if unknown.
        line: line number from 1; 0 if unknown.
        forward_ns, backward_ns, update_ns, other_ns: its part of the step time, by phase; all lines
            add up to the step.
        peak_bytes: its memory when the step reaches its peak; all lines add up to the peak.
        calls: number of its operators in one step.
        modules: modules that it calls, such as ``model.blocks.0.mlp``; the first 8.
        function: enclosing function, such as ``Block.forward``; empty if unknown.
        callers: call stacks, each from the nearest ``file:line`` outwards; the first 4.
    """

    path: str
    line: int
    forward_ns: float
    backward_ns: float
    update_ns: float
    other_ns: float
    peak_bytes: int
    calls: int
    modules: tuple[str, ...] = ()
    function: str = ""
    callers: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class ModuleCost(_Phases):
    """Cost of one module, including its submodules.

    Attributes:
        name: qualified name, such as ``model.blocks.0``.
        kind: name of its class.
        path: absolute path of the user's file that defines the class; empty for a library class.
        made: the user's ``file:line`` that creates it, relative to the project root; empty if
            unknown.
    """

    name: str
    kind: str
    path: str
    made: str
    forward_ns: float
    backward_ns: float
    update_ns: float
    other_ns: float
    peak_bytes: int

    @classmethod
    def total(cls, parts: Iterable[LineCost | ModuleCost]) -> ModuleCost:
        """Return the sum of lines or modules."""
        rows = [(o.forward_ns, o.backward_ns, o.update_ns, o.other_ns, o.peak_bytes) for o in parts]
        return cls("", "", "", "", *map(sum, zip(*rows, strict=True)))


@dataclass(frozen=True)
class Costs:
    """Costs of a step.

    Attributes:
        step_ns: time of the step, the sum of the lines and `untracked`.
        peak_bytes: peak memory of the step; 0 if memory was not recorded.
        samples: samples per step; 0 if unknown.
        lines: costs per line, the most expensive first.
        untracked: cost without a source line.
        page_faults_ns: the part of `untracked` for page faults, known only per step.
        modules: costs per module, each before its submodules.
        work: hash of the operators, their shapes and order, independent of lines; empty if unknown.
    """

    step_ns: float
    peak_bytes: int
    samples: int
    lines: tuple[LineCost, ...]
    untracked: LineCost
    page_faults_ns: float = 0.0
    modules: tuple[ModuleCost, ...] = field(default=())
    work: str = ""

    @property
    def throughput(self) -> float:
        """Samples per second; 0 if unknown."""
        return self.samples / self.step_ns * 1e9 if self.step_ns else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `of_json` reads."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Costs:
        """Read a JSON object of `to_json`."""

        def line(row: Mapping[str, Any]) -> LineCost:
            callers = tuple(tuple(caller) for caller in row["callers"])
            return LineCost(**{**row, "modules": tuple(row["modules"]), "callers": callers})

        lines = tuple(line(row) for row in value["lines"])
        modules = tuple(ModuleCost(**row) for row in value["modules"])
        untracked = line(value["untracked"])
        return cls(**{**value, "lines": lines, "untracked": untracked, "modules": modules})


def costs(graph: Graph, root: Path, *, timeline: Timeline | None = None) -> Costs:
    """Return the costs of a step per source line and module.

    Args:
        root: folder that the graph's lines are relative to, see `workload.lines.project_root`.
        timeline: the simulated `graph`; None to simulate it.
    """
    attribution = attribute(timeline or replay(graph))
    lines = tuple(
        LineCost(
            str(root / line.file), line.number, *_numbers(line.cost), line.cost.tasks,
            line.modules[:_MAX_MODULES], line.function, line.callers[:_MAX_CALLERS],
        )
        for line in attribution.lines
    )  # fmt: skip
    untracked = attribution.untracked + attribution.page_faults
    return Costs(
        attribution.step_ns,
        attribution.peak_bytes,
        graph.samples,
        lines,
        LineCost("", 0, *_numbers(untracked), untracked.tasks),
        attribution.page_faults.time_ns,
        tuple(_modules(graph, attribution, root)),
        _work(graph),
    )


def _work(graph: Graph) -> str:
    tasks = graph.tasks
    calls = [repr((call.op, _sizes(call.arguments), call.outputs)) for call in graph.calls]
    # Page faults (call < 0) are excluded: their number varies between launches.
    rows = zip(tasks.call.tolist(), tasks.phase.tolist(), tasks.lane.tolist(), strict=True)
    texts = [f"{calls[call]} {phase} {lane}" for call, phase, lane in rows if call >= 0]
    return hashlib.sha256("\n".join([str(graph.samples), *texts]).encode()).hexdigest()


def _sizes(value: Any) -> Any:
    """Replace floats, such as a learning rate, with None: they do not affect cost."""
    if isinstance(value, (list, tuple)):
        return [_sizes(item) for item in value]
    return None if isinstance(value, float) else value


def _modules(graph: Graph, attribution: Attribution, root: Path) -> list[ModuleCost]:
    kinds, lines = graph.meta.get("modules"), graph.meta.get("lines")
    files = lines.get("files") if isinstance(lines, Mapping) else None
    if not isinstance(kinds, Mapping):
        return []
    sources = files if isinstance(files, Mapping) else {}
    # Add each module's own operators to all modules that contain it.
    sums: dict[str, Cost] = {}
    for name, cost in attribution.modules.items():
        while name:
            sums[name] = sums.get(name, Cost()) + cost
            name = name.rpartition(".")[0]
    return [
        ModuleCost(
            str(name), str(kind), str(root / str(sources[name])) if name in sources else "",
            attribution.made_at(str(name)), *_numbers(sums.get(str(name), Cost())),
        )
        for name, kind in kinds.items()
    ]  # fmt: skip


def _numbers(cost: Cost) -> tuple[float, float, float, float, int]:
    other, forward, backward, update = cost.phase_ns
    return forward, backward, update, other, cost.memory_bytes
