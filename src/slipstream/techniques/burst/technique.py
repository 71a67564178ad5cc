"""Burst parallelism: a number of devices for each layer, and a batch that they share.

The prediction is the step of the first device, which runs every layer on its share of the batch.
Where the number of devices changes, activations and their gradients are moved; the gradients of
parameters are all-reduced by the devices of their layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from slipstream.cluster import Cluster, Collective, Group
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import (
    Editor,
    Graph,
    Role,
    StepPhase,
    Tasks,
    insert_exchange,
    replay,
)
from slipstream.graph.parts import Boundary, Cut, Indices, boundaries, cut
from slipstream.technique import CodeChange, Context, Quality, QualityKind, Traits
from slipstream.techniques.batch_size import BatchSize
from slipstream.techniques.burst import planner
from slipstream.techniques.burst.costs import burst_layers, device_options, reshard
from slipstream.techniques.burst.planner import BurstLayer, BurstPlan, Floats
from slipstream.techniques.distributed.ddp import copying, put_copy
from slipstream.techniques.distributed.gradients import (
    DEFAULT_MIB,
    Gradient,
    ddp_buckets,
    gradients,
    last_backward,
    nbytes_of,
)
from slipstream.techniques.distributed.replicas import REPLICAS, Spreads
from slipstream.units import format_duration

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload

_BATCH_NORM = "batch_norm"
# Plans that a note compares.
_SHOWN = 5
_CONFLICTS = frozenset({"accumulation", "sharded_update", "batch_size"})


@dataclass(frozen=True)
class Burst(Spreads):
    """Each layer on as many of `workers` devices as make the step fast; the batch stays the same.

    Attributes:
        workers: largest number of devices of a layer.
        amplification: upper limit of a layer's device time relative to its time on one device.
        deadline_ms: of the step; the plan with the least device time that meets it.
        device_ms: upper limit of the sum of all devices' time in a step.
        plan: numbers of devices, each but the first with the module from which they apply:
            ``8/2@features.24/1@classifier``; by default the fastest within the limits.
    """

    workers: int = 2
    amplification: float = math.inf
    deadline_ms: float = math.inf
    device_ms: float = math.inf
    plan: str = ""

    name: ClassVar[str] = "burst"
    traits: ClassVar[Traits] = replace(
        REPLICAS, axis="layer", conflicts=_CONFLICTS, variants=("burst",)
    )
    effect: ClassVar[Quality] = Quality(QualityKind.ROUNDING, "gradients are summed over devices")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("amplification", 1.0), ("deadline_ms", 0.0), ("device_ms", 0.0)):
            if not (limit := getattr(self, name)) >= least:
                raise InvalidArgumentError(f"burst:{name}", f"{limit} is not at least {least:g}")
        for devices, _ in self.bursts:
            if not 1 <= devices <= self.workers:
                raise InvalidArgumentError(
                    "burst:plan", f"{devices} is not between 1 and workers={self.workers}"
                )

    @property
    def bursts(self) -> list[tuple[int, str]]:
        """Devices and first module of each part of `plan`; empty without one.

        Raises:
            InvalidArgumentError: it cannot be read.
        """
        found = []
        for number, text in enumerate(self.plan.split("/") if self.plan else ()):
            devices, _, module = text.partition("@")
            if not devices.isdecimal() or bool(module) != bool(number):
                raise InvalidArgumentError(
                    "burst:plan", f"'{text}' in '{self.plan}' cannot be read",
                    remedy="for example burst:8,plan=8/2@features.24/1@classifier",
                )  # fmt: skip
            found.append((int(devices), module))
        return found

    @property
    def limits(self) -> dict[str, float]:
        """Arguments of `planner.plan`."""
        return {
            "amplification": self.amplification, "deadline_ns": self.deadline_ms * 1e6,
            "device_ns": self.device_ms * 1e6,
        }  # fmt: skip

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why layers cannot run on different devices; None if they can."""
        if (reason := super().why_not(graph, workload)) is not None:
            return reason
        for task in np.flatnonzero(graph.tasks.phase == StepPhase.FORWARD).tolist():
            if _BATCH_NORM in graph.task(task).name:
                return (
                    f"batch norm '{graph.task(task).module}' would normalise the samples of each "
                    "device separately"
                )
        if self.bursts and all(devices == 1 for devices, _ in self.bursts):
            return "its plan is a single device"
        wrong = [g for g, _ in self.bursts if graph.samples % g]
        if wrong or (len(self._options(graph)) < 2 and not self.plan):
            among = wrong[0] if wrong else f"{'2 to ' * (self.workers > 2)}{self.workers}"
            return f"{graph.samples} samples do not divide among {among} devices"
        reasons = (_resize(graph, g).why_not(graph) for g in self._options(graph) if g > 1)
        return next(filter(None, reasons), None)

    def required_timings(self, graph: Graph) -> Sequence[Any]:
        """Return the operators at every share of the batch, and copies of gradients."""
        sizes = [_resize(graph, g) for g in self._options(graph) if g > 1]
        calls = [call for size in sizes for call in size.required_timings(graph)]
        return [*calls, *(copying(gradient.spec) for gradient in gradients(graph))]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Run each layer on its share of the batch; insert moves and exchanges of gradients."""
        cluster = self.need_cluster(context)
        # Fails if there are too few devices.
        self.group(cluster)
        steps, found = self._steps(graph, context), _layers(graph)
        layers = self._costs(graph, cluster, steps)
        limits = self._planner_limits(graph, layers)
        chosen = self._chosen(layers, list(steps), limits)
        parts = [(devices, found.get(chosen.layers[first])) for devices, first in chosen.bursts]
        where = cut(graph, [boundary.module for _, boundary in parts if boundary is not None])
        resized = _resized(graph, where, [steps[devices] for devices, _ in parts])
        edit = Editor(resized, str(self))
        end = last_backward(graph)
        for number, (devices, boundary) in enumerate(parts):
            if boundary is not None:
                before = parts[number - 1][0]
                _move(edit, graph, cluster, where, number, before, devices)
            if devices > 1:
                own = set(where.backward(number).tolist())
                in_part = [gradient for gradient in gradients(graph) if gradient.task in own]
                _reduce(edit, context, cluster, in_part, devices, end)
        front = [] if self.plan else planner.pareto(
            layers, list(steps), amplification=self.amplification
        )  # fmt: skip
        edited = edit.apply(f"plan={chosen.spec}", _note(chosen, front))
        meta = {**graph.meta, "workers": max(chosen.devices)}
        if front:
            meta["plans"] = {
                "chosen": chosen.spec,
                "plans": [[each.spec, each.time_ns, each.device_ns] for each in front],
                **{name: limits[name] if limits[name] < math.inf else None
                   for name in ("deadline_ns", "device_ns")},
            }  # fmt: skip
        return replace(edited, meta=meta)

    def candidates(self, graph: Graph, context: Context) -> list[BurstPlan]:
        """Return the plans that no other plan dominates in time and device time, fastest first."""
        steps = self._steps(graph, context)
        layers = self._costs(graph, self.need_cluster(context), steps)
        return planner.pareto(layers, list(steps), amplification=self.amplification)

    def _options(self, graph: Graph) -> list[int]:
        """Return the numbers of devices that are compared, or that the plan has."""
        used = {1, *(devices for devices, _ in self.bursts)}
        options = device_options(self.workers, graph.samples)
        return [g for g in options if not self.plan or g in used]

    def _steps(self, graph: Graph, context: Context) -> dict[int, Graph]:
        """Return the step at each device's share of the batch, by number of devices."""
        return {
            g: _resize(graph, g).predict(graph, context) if g > 1 else graph
            for g in self._options(graph)
        }

    def _costs(self, graph: Graph, cluster: Cluster, steps: dict[int, Graph]) -> list[BurstLayer]:
        found = _layers(graph)
        where = cut(graph, [boundary.module for boundary in found.values()])
        passes = [_passes(where, number) for number in range(len(found) + 1)]
        busy = [step.tasks.duration_ns + step.tasks.gap_ns for step in steps.values()]
        times: Floats = np.array([[times[tasks].sum() for times in busy] for tasks in passes])
        at = np.array([gradient.task for gradient in gradients(graph)])
        sizes = np.array([gradient.spec.nbytes for gradient in gradients(graph)], np.float64)
        nbytes = [float(sizes[np.isin(at, tasks)].sum()) for tasks in passes]
        outputs = [*(boundary.spec(graph).nbytes for boundary in found.values()), 0]
        return burst_layers(cluster, list(steps), ["", *found], times, nbytes, outputs)

    def _planner_limits(self, graph: Graph, layers: Sequence[BurstLayer]) -> dict[str, float]:
        """Return the limits, with the deadline of the layers instead of the step."""
        # The times of layers exclude the update and what precedes the forward pass.
        shared_ns = replay(graph).step_ns - sum(float(layer.work_ns[0]) for layer in layers)
        return self.limits | {"deadline_ns": self.limits["deadline_ns"] - shared_ns}

    def _chosen(
        self, layers: Sequence[BurstLayer], options: list[int], limits: dict[str, float]
    ) -> BurstPlan:
        if self.plan:
            counts = planner.spread(self.bursts, [layer.name for layer in layers])
            layers = [
                replace(layer, work_ns=np.where(np.equal(options, g), layer.work_ns, np.inf))
                for layer, g in zip(layers, counts, strict=True)
            ]
            return planner.plan(layers, options)
        try:
            return planner.plan(layers, options, **limits)
        except InvalidArgumentError as error:
            what = error.what.removeprefix(f"{error.argument}: ")
            if error.argument == "deadline_ns":
                shared_ns = self.limits["deadline_ns"] - limits["deadline_ns"]
                what += f", next to {format_duration(shared_ns)} for the rest of the step"
            setting = f"burst:{error.argument.replace('_ns', '_ms')}"
            raise InvalidArgumentError(setting, what, remedy=error.remedy) from error

    def apply(self, built: BuiltWorkload) -> None:
        """Run the layers of this process, one of `workers` that have joined a group.

        Raises:
            WorkloadError: the group has another size, or the model cannot run in bursts.
        """
        from slipstream.techniques.burst.runner import run_in_bursts

        self.need_joined()
        self.need_part(built.model, "the model")
        if not built.training or built.own_step:
            raise WorkloadError(
                "burst needs the loss and the optimizer of the step",
                remedy="return (model, batch, loss, optimizer)",
            )
        run_in_bursts(built, self.bursts, self.limits)

    def code(self, workload: Workload) -> CodeChange | None:
        return self.by_hand(
            "", "see torch.distributed.tensor: redistribute activations between DeviceMeshes"
        )


def _note(chosen: BurstPlan, front: Sequence[BurstPlan]) -> str:
    """Return the plan, and some of those that no other one dominates, from the fastest."""
    shown = [front[round(n)] for n in np.linspace(0, len(front) - 1, _SHOWN)] if front else []
    texts = {
        each.spec: f"{each.spec}: {format_duration(each.time_ns)}, "
        f"{format_duration(each.device_ns)} of device time"
        for each in (chosen, *shown)
    }
    return f"plan={'; or '.join(texts.values())} (layers and moves, one after the other)"


def _resize(graph: Graph, devices: int) -> BatchSize:
    return BatchSize(str(graph.samples // devices))


def _passes(where: Cut, part: int) -> Indices:
    """Return the forward and backward tasks of a part."""
    return np.concatenate([where.forward[part], where.backward(part)])


def _layers(graph: Graph) -> dict[str, Boundary]:
    """Return where layers but the first begin, by name without that of the model.

    Layers are the children of nested ``nn.Sequential``, as in `apply`, or else any modules.
    """
    classes: Any = graph.meta.get("modules")
    classes = classes if isinstance(classes, dict) else {}
    found, modules = {}, {}
    for boundary in boundaries(graph):
        # The module of the task may be within the layer that begins there.
        words = graph.task(boundary.task).module.split(".")
        length, least = 1, boundary.module.count(".") + 1
        while length < len(words) and classes.get(".".join(words[:length])) == "Sequential":
            length += 1
        modules[boundary.module.partition(".")[2] or boundary.module] = boundary
        # The module of a loss has no name within the model; it runs with the last layer.
        if length >= least and (name := ".".join(words[1:length])):
            found[name] = boundary
    return found or modules


def _resized(graph: Graph, where: Cut, steps: Sequence[Graph]) -> Graph:
    """Return the step whose part n has the times, calls and allocations of ``steps[n]``."""
    tasks, memory = graph.tasks.take(np.arange(len(graph))).columns(), graph.memory
    calls, nbytes = [*graph.calls], memory.nbytes.copy()
    for number, step in enumerate(steps):
        if step is graph:
            continue
        part = _passes(where, number)
        for name in ("duration_ns", "gap_ns", "spread", "provenance"):
            tasks[name][part] = step.tasks.columns()[name][part]
        call = step.tasks.call[part]
        tasks["call"][part] = np.where(call >= 0, call + len(calls), -1)
        calls += step.calls
        own = np.isin(memory.producer, part) | ((memory.role == Role.INPUT) & (number == 0))
        nbytes[own] = step.memory.nbytes[own]
    return replace(
        graph, tasks=Tasks(**tasks), calls=tuple(calls), shrunk=(),
        memory=replace(memory, nbytes=nbytes),
    )  # fmt: skip


def _move(
    edit: Editor, graph: Graph, cluster: Cluster, where: Cut, number: int, before: int, devices: int
) -> None:
    """Insert the moves of activations to a part, and of their gradients back."""
    boundary, backward = where.boundaries[number - 1], where.backward(number)
    nbytes = boundary.spec(graph).nbytes
    ready = int(where.forward[number - 1].max())
    handle = insert_exchange(
        edit, cluster, reshard(nbytes, before, devices), beside=ready, ready=ready,
        awaited=boundary.task, name="move activations", purpose="activation",
    )  # fmt: skip
    if len(graph.memory):
        last = int(backward.max(initial=where.forward[number].max()))
        edit.allocate(nbytes // devices, Role.ACTIVATION, handle, last)
    if len(earlier := where.backward(number - 1)):
        ready = int(backward.max())
        insert_exchange(
            edit, cluster, reshard(nbytes, devices, before), beside=ready, ready=ready,
            awaited=int(earlier.min()), name="move gradients", purpose="activation",
        )  # fmt: skip


def _reduce(
    edit: Editor, context: Context, cluster: Cluster, part: list[Gradient], devices: int, end: int
) -> None:
    """Insert all-reduces of a part's gradients, in buckets, which the update awaits."""
    for bucket in ddp_buckets(part, DEFAULT_MIB):
        copies = [
            put_copy(edit, context, gradient.spec, gradient.task, "into bucket")
            for gradient in bucket
        ]
        back = [put_copy(edit, context, gradient.spec, end, "out of bucket") for gradient in bucket]
        insert_exchange(
            edit, cluster,
            Collective("all_reduce", nbytes_of(bucket), Group.of(np.arange(devices))),
            beside=bucket[-1].task, ready=copies[-1], awaited=back[0],
            tensors=tuple(gradient.spec for gradient in bucket),
            modules=tuple(gradient.module for gradient in bucket), name="all_reduce of gradients",
        )  # fmt: skip
