"""What each source line and module of a step costs, as the server keeps it; adds up exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.graph import Attribution, Cost, Graph, Timeline, attribute, replay

_MODULES_SHOWN, _WAYS_SHOWN = 8, 4


class _Phases:
    """What a line and a module have in common: time by phase, and memory at the peak."""

    forward_ns: float
    backward_ns: float
    update_ns: float
    other_ns: float
    peak_bytes: int

    @property
    def total_ns(self) -> float:
        """All of its time."""
        return self.forward_ns + self.backward_ns + self.update_ns + self.other_ns


@dataclass(frozen=True)
class LineCost(_Phases):
    """What one line of the user's source costs in one step.

    Attributes:
        path: the file, absolute; empty for what no line is known of.
        line: from 1; 0 where none is known.
        forward_ns, backward_ns, update_ns, other_ns: its share of the step's time by phase;
            together, over all lines, the step.
        peak_bytes: what it holds at the moment the step holds most; over all lines the peak.
        calls: operators of it that run in one step.
        modules: of the model that it calls, such as ``model.blocks.0.mlp``; a few of many.
        function: what it is in, such as ``Block.forward``; empty where unknown.
        callers: ways it was reached, each from the nearest ``file:line`` outwards; a few of many.
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
    """What one module costs with all that is in it.

    Attributes:
        name: qualified, ``model.blocks.0``.
        kind: its class.
        path: the user's file that defines the class, absolute; empty for a library's.
        made: the user's ``file:line`` that makes it, from the project's root; empty if unknown.
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
        """What lines or modules cost together."""
        rows = [(o.forward_ns, o.backward_ns, o.update_ns, o.other_ns, o.peak_bytes) for o in parts]
        return cls("", "", "", "", *map(sum, zip(*rows, strict=True)))


@dataclass(frozen=True)
class Costs:
    """What a step costs, line by line.

    Attributes:
        step_ns: time of the step; the lines and `untracked` add up to it.
        peak_bytes: the most it holds at once; 0 where memory was not recorded.
        samples: per step; 0 if unknown.
        lines: the most expensive first.
        untracked: what no source line is known of.
        page_faults_ns: of `untracked`: page faults, which are known of the step as a whole.
        modules: of the model, each before those in it.
        work: the same for steps that run the same operators on the same shapes in the same order,
            whatever their lines are; empty if unknown.
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
        """As JSON; `of_json` reads it."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Costs:
        """What `to_json` wrote."""

        def line(one: Mapping[str, Any]) -> LineCost:
            callers = tuple(tuple(caller) for caller in one["callers"])
            return LineCost(**{**one, "modules": tuple(one["modules"]), "callers": callers})

        lines = tuple(line(one) for one in value["lines"])
        modules = tuple(ModuleCost(**one) for one in value["modules"])
        untracked = line(value["untracked"])
        return cls(**{**value, "lines": lines, "untracked": untracked, "modules": modules})


def costs(graph: Graph, root: Path, *, timeline: Timeline | None = None) -> Costs:
    """What each source line and module costs.

    Args:
        root: the folder that the graph's lines are named from, see `workload.lines.project_root`.
        timeline: `graph` simulated, if that is at hand.
    """
    attribution = attribute(timeline or replay(graph))
    lines = tuple(
        LineCost(
            str(root / line.file), line.number, *_numbers(line.cost), line.cost.tasks,
            line.modules[:_MODULES_SHOWN], line.function, line.callers[:_WAYS_SHOWN],
        )
        for line in attribution.lines
    )  # fmt: skip
    rest = attribution.untracked + attribution.page_faults
    return Costs(
        attribution.step_ns,
        attribution.peak_bytes,
        graph.samples,
        lines,
        LineCost("", 0, *_numbers(rest), rest.tasks),
        attribution.page_faults.time_ns,
        tuple(_modules(graph, attribution, root)),
        _work(graph),
    )


def _work(graph: Graph) -> str:
    tasks = graph.tasks
    calls = [repr((one.op, _sizes(one.arguments), one.outputs)) for one in graph.calls]
    # Page faults, of which there are some or none from launch to launch, are no work of the step's.
    rows = zip(tasks.call.tolist(), tasks.phase.tolist(), tasks.lane.tolist(), strict=True)
    texts = [f"{calls[call]} {phase} {lane}" for call, phase, lane in rows if call >= 0]
    return hashlib.sha256("\n".join([str(graph.samples), *texts]).encode()).hexdigest()


def _sizes(value: Any) -> Any:
    """A call's arguments without real numbers, such as a learning rate: they cost nothing."""
    if isinstance(value, (list, tuple)):
        return [_sizes(one) for one in value]
    return None if isinstance(value, float) else value


def _modules(graph: Graph, attribution: Attribution, root: Path) -> list[ModuleCost]:
    kinds, lines = graph.meta.get("modules"), graph.meta.get("lines")
    files = lines.get("files") if isinstance(lines, Mapping) else None
    if not isinstance(kinds, Mapping):
        return []
    known = files if isinstance(files, Mapping) else {}
    # Each module's own operators, added up from the innermost outwards.
    sums: dict[str, Cost] = {}
    for name, cost in attribution.modules.items():
        while name:
            sums[name] = sums.get(name, Cost()) + cost
            name = name.rpartition(".")[0]
    return [
        ModuleCost(
            str(name), str(kind), str(root / str(known[name])) if name in known else "",
            attribution.made_at(str(name)), *_numbers(sums.get(str(name), Cost())),
        )
        for name, kind in kinds.items()
    ]  # fmt: skip


def _numbers(cost: Cost) -> tuple[float, float, float, float, int]:
    other, forward, backward, update = cost.phase_ns
    return forward, backward, update, other, cost.memory_bytes
