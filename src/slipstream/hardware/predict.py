"""A recorded step on an accelerator, as an edit of its graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.durations.work import work
from slipstream.errors import InvalidArgumentError
from slipstream.graph import Call, Editor, Graph, Kind, StepPhase
from slipstream.graph.flow import Match, flow_of
from slipstream.graph.page_faults import page_fault_tasks
from slipstream.graph.traffic import OperatorClass, map_operations, operator_class, traffic
from slipstream.hardware.accelerator import Accelerator
from slipstream.hardware.layers import LayerShape, Operand, Pass, layers_of
from slipstream.hardware.mapping import Chips, vector_cost_ns
from slipstream.hardware.simulate import PassCost, simulate_pass
from slipstream.provenance import Provenance
from slipstream.units import format_duration

_ASSUMED_SPREAD = 0.2
_BATCH_NORMS = (
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::_batch_norm_with_update",
)
_SMOOTH = ("aten::gelu", "aten::silu", "aten::sigmoid", "aten::tanh", "aten::elu", "aten::softplus")
_BIAS = "aten::add_"
_RECORD = "slipstream profile WORKLOAD --record sparsity -o run.slipgraph"
# Fewer zeros than this do not speed up a pass noticeably.
_FEW_ZEROS = 0.02


@dataclass(frozen=True)
class LayerCost:
    """A layer of the step on an accelerator.

    Attributes:
        module: its qualified name in the model; empty for the model itself.
        shape: its shape.
        passes: the passes that the step runs.
        nans: number of NaNs in its operands.
        behind: the operator that reads its output, if that makes the gradient dense.
    """

    module: str
    shape: LayerShape
    passes: tuple[PassCost, ...]
    nans: int
    behind: str | None


@dataclass(frozen=True, eq=False)
class AcceleratorStep:
    """A recorded step on an accelerator.

    Attributes:
        chip: the accelerator.
        graph: the edited step.
        dense: the same step if only zeros that the layers' shapes insert were skipped.
        layers: layers with their passes, in program order.
        vector_ns: time of all operators without a product of a parameter.
        notes: what was assumed.
    """

    chip: Accelerator
    graph: Graph
    dense: Graph
    layers: tuple[LayerCost, ...]
    vector_ns: float
    notes: tuple[str, ...]


def accelerate(graph: Graph, chip: Accelerator) -> AcceleratorStep:
    """Return a recorded step on `chip`.

    Layers are simulated from the masks of the statistic "sparsity", or dense without them. All
    other operators run on the vector unit, or on the array if they are products of activations.

    Raises:
        InvalidArgumentError: the step has no convolution or linear layer, ran on a GPU, or has an
            operator that the accelerator cannot run.
    """
    if (graph.tasks.kind == Kind.KERNEL).any():
        raise InvalidArgumentError(
            "accelerator", "the step was recorded on a GPU", remedy="record it on the CPU"
        )
    found = layers_of(graph)
    if not found:
        raise InvalidArgumentError("accelerator", "the step has no convolution or linear layer")
    masks = _Masks(graph)
    skipping, dense = Editor(graph, chip.name), Editor(graph, f"{chip.name}, dense")
    layers, covered = [], set()
    for match, shape in found:
        operands, nans = masks.of(match, shape)
        passes: list[PassCost] = []
        for task, run in tasks_of_layer(graph, match):
            costs = [
                simulate_pass(shape, which, operands, chip, item_bytes=item_bytes(match))
                for which in run
            ]
            passes += costs
            covered.add(task)
            skipping.set_duration(
                task, sum(cost.time_ns for cost in costs), Provenance.SIMULATED, spread=0.0
            )
            dense.set_duration(
                task, sum(cost.dense_ns for cost in costs), Provenance.SIMULATED, spread=0.0
            )
        layers.append(LayerCost(match.module, shape, tuple(passes), nans, _behind(graph, match)))
    vector_ns = 0.0
    for task, nanoseconds in _other_tasks(graph, covered, chip):
        vector_ns += nanoseconds
        for edit in (skipping, dense):
            edit.set_duration(task, nanoseconds, Provenance.ASSUMED, spread=_ASSUMED_SPREAD)
    faults = np.array(page_fault_tasks(graph), np.int64)
    uncalled = np.setdiff1d(np.flatnonzero(graph.tasks.call < 0), faults)
    for edit in (skipping, dense):
        edit.set_gap(np.arange(len(graph)), 0.0)
        edit.remove(faults)
    what = f"{len(layers)} layers on {chip.name}"
    notes = tuple(_notes(graph, layers, masks, uncalled))
    return AcceleratorStep(
        chip, skipping.apply(what), dense.apply(what), tuple(layers), vector_ns, notes
    )


class _Masks:
    """Masks of the step by module, call and operand."""

    def __init__(self, graph: Graph) -> None:
        self._masks = {(m.module, m.call, m.operand): m for m in graph.statistics.masks}
        self._calls: dict[str, int] = {}
        self.missing: list[str] = []

    def of(self, match: Match, shape: LayerShape) -> tuple[dict[Operand, NDArray[np.bool_]], int]:
        """Return the masks of the next call of a layer, in the form of its shape; and the NaNs."""
        call = self._calls.get(match.module, 0)
        self._calls[match.module] = call + 1
        found, nans = {}, 0
        for operand, size in shape.shapes.items():
            mask = self._masks.get((match.module, call, operand.value))
            if mask is None or match.settings.transposed or np.prod(mask.shape) != np.prod(size):
                continue
            bits = mask.unpacked()
            if not match.settings.kernel and operand is not Operand.WEIGHT:
                bits = bits.reshape(-1, mask.shape[-1]).T
            found[operand] = bits.reshape(size)
            nans += mask.nans
        if not found:
            self.missing.append(match.module)
        return found, nans


def tasks_of_layer(graph: Graph, match: Match) -> Iterator[tuple[int, list[Pass]]]:
    """Yield the tasks of a layer with the passes that each runs."""
    transposed = {Pass.FORWARD: Pass.INPUT, Pass.INPUT: Pass.FORWARD, Pass.WEIGHT: Pass.WEIGHT}
    for task in match.forward:
        yield task, [transposed[Pass.FORWARD] if match.settings.transposed else Pass.FORWARD]
    weight = int(np.prod(match.settings.weight_shape(match.x))) if match.x.shape else 0
    for task in match.backward:
        call = graph.calls[graph.tasks.call[task]]
        if call.name.endswith("convolution_backward"):
            flags = list(call.arguments[-1])
            run = [
                which for which, flag in zip((Pass.INPUT, Pass.WEIGHT), flags, strict=False) if flag
            ]
        else:
            made = call.outputs[0].numel if call.outputs else 0
            last = task == match.backward[-1]
            run = [
                Pass.WEIGHT if made == weight and (made != match.x.numel or last) else Pass.INPUT
            ]
        if match.settings.transposed:
            run = [transposed[which] for which in run]
        yield task, run


def item_bytes(match: Match) -> int:
    return match.x.nbytes // max(match.x.numel, 1)


def _other_tasks(graph: Graph, covered: set[int], chip: Accelerator) -> Iterator[tuple[int, float]]:
    chips = Chips.of(chip)
    times: dict[int, float] = {}
    for task, number in enumerate(graph.tasks.call.tolist()):
        if task in covered or number < 0:
            continue
        if number not in times:
            times[number] = _operator_ns(graph.calls[number], chips, chip)
        yield task, times[number]


def _operator_ns(call: Call, chips: Chips, chip: Accelerator) -> float:
    """Return the time of an operator that is not a layer, in ns."""
    kind, moved = operator_class(call), traffic(call).total
    if kind is OperatorClass.VIEW:
        return 0.0
    if kind is not OperatorClass.CONTRACTION:
        operations = map_operations(call)
        return float(vector_cost_ns(operations, moved, chips)[0])
    done = work(call)
    if done is None or not done.flops:
        raise InvalidArgumentError(
            "accelerator", f"{chip.name} cannot run '{call.name}'",
            remedy="express it as linear layers, convolutions or matmuls",
        )  # fmt: skip
    compute_ns = done.flops / 2 / chip.array.macs / chip.clock_hz.value * 1e9
    return max(compute_ns, float(vector_cost_ns(0, moved, chips)[0]))


def _behind(graph: Graph, match: Match) -> str | None:
    """Return the batch norm or smooth activation behind a layer, which makes its gradient dense."""
    if not match.backward:
        return None
    flow = flow_of(graph)
    readers = flow.readers[match.forward[0]]
    # The bias may be added in place.
    readers = readers + [
        r for task in readers if flow.name(task) == _BIAS for r in flow.readers[task]
    ]
    # The backward pass reads the output, too.
    forward = [task for task in readers if graph.tasks.phase[task] == StepPhase.FORWARD]
    names = map(flow.name, forward)
    return next((name for name in names if name in (*_BATCH_NORMS, *_SMOOTH)), None)


def _notes(
    graph: Graph, layers: list[LayerCost], masks: _Masks, uncalled: NDArray[np.int64]
) -> Iterator[str]:
    if kept_ns := float(graph.tasks.duration_ns[uncalled].sum()):
        yield f"tasks without an operator keep the host's time: {format_duration(kept_ns)}"
    if not graph.statistics.masks:
        yield f"no masks were recorded, so every layer is dense; record them: {_RECORD}"
    elif masks.missing:
        yield f"{len(masks.missing)} layers without masks are dense: {', '.join(masks.missing[:3])}"
    if nans := sum(layer.nans for layer in layers):
        yield f"{nans} values are NaN, which count as nonzero"
    if not any(cost.which is not Pass.FORWARD for layer in layers for cost in layer.passes):
        yield "the step has no backward pass: record a training step to include both gradients"
    yield "the host's time between operators and page faults are not included"
    yield from advice(layers)


def advice(layers: list[LayerCost]) -> Iterator[str]:
    """Yield what would let the accelerator skip more."""
    for operators, what in (
        (_BATCH_NORMS, "batch norm makes the gradient of {} dense: fold it, or put it after ReLU"),
        (_SMOOTH, "'{1}' makes the gradient of {0} dense: ReLU has exact zeros"),
    ):
        dense = [
            layer for layer in layers
            if layer.behind in operators
            and any(c.which is not Pass.FORWARD and c.sparsity < _FEW_ZEROS for c in layer.passes)
        ]  # fmt: skip
        if dense:
            count = f"{len(dense)} layer{'s' * (len(dense) > 1)}"
            yield what.format(count, str(dense[0].behind).removeprefix("aten::"))


def energy_pj(
    step: AcceleratorStep, *, dense: bool = False, changes: Mapping[str, float] | None = None
) -> tuple[float, float]:
    """Return the energy of the step's layers, in pJ: of the lanes, and of the memories.

    Args:
        dense: whether only zeros that the layers' shapes insert are skipped.
        changes: other constants, by attribute of `Chips`.
    """
    chips = Chips.of(step.chip, **changes or {})
    scheduled = step.chip.frontend.kind == "lookahead" and not dense
    parts = [
        (cost.dense if dense else cost.cost).energy_pj(chips, scheduled=scheduled)
        for layer in step.layers
        for cost in layer.passes
    ]
    return sum(float(part[0][0]) for part in parts), sum(float(part[1][0]) for part in parts)


def sensitivity(step: AcceleratorStep) -> dict[str, tuple[float, float]]:
    """Return by constant the relative changes of time and energy of the layers if it is doubled."""
    time_ns = sum(cost.time_ns for layer in step.layers for cost in layer.passes)
    energy = sum(energy_pj(step))
    changes = {}
    for name in ("clock_hz", "dram_bytes_per_s", *vars(step.chip.energy)):
        chips = Chips.of(step.chip)
        doubled = {name: float(2 * getattr(chips, name)[0])}
        other = Chips.of(step.chip, **doubled)
        new_ns = sum(float(c.cost.time_ns(other)[0]) for layer in step.layers for c in layer.passes)
        changes[name] = new_ns / time_ns - 1, sum(energy_pj(step, changes=doubled)) / energy - 1
    return changes
