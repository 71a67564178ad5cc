"""A recorded step on an accelerator, as an edit of its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from slipstream.hardware.mapping import Chips
from slipstream.hardware.ordering import best_order
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
RECORD = "slipstream profile WORKLOAD --record sparsity -o run.slipgraph"
# Fewer zeros than this do not speed up a pass noticeably.
_FEW_ZEROS = 0.02
# Layers of which other orders of channels are simulated.
_ORDERED_LAYERS = 5


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
    edits = Editor(graph, chip.name), Editor(graph, f"{chip.name}, dense")
    layers, covered = [], []
    for (match, shape), (masks, nans) in zip(found, recorded_masks(graph, found), strict=True):
        passes: list[PassCost] = []
        for task, run in tasks_of_layer(graph, match):
            costs = [
                simulate_pass(shape, which, masks, chip, item_bytes=item_bytes(match))
                for which in run
            ]
            passes += costs
            covered.append(task)
            times_ns = sum(cost.time_ns for cost in costs), sum(cost.dense_ns for cost in costs)
            for edit, time_ns in zip(edits, times_ns, strict=True):
                edit.set_duration(task, time_ns, Provenance.SIMULATED, spread=0.0)
        layers.append(LayerCost(match.module, shape, tuple(passes), nans, _behind(graph, match)))
    others = np.setdiff1d(np.flatnonzero(graph.tasks.call >= 0), covered)
    numbers, which_call = np.unique(graph.tasks.call[others], return_inverse=True)
    call_ns = np.array([_operator_ns(graph.calls[number], chip) for number in numbers], float)
    vector_ns = call_ns[which_call]
    faults = np.array(page_fault_tasks(graph), np.int64)
    uncalled = np.setdiff1d(np.flatnonzero(graph.tasks.call < 0), faults)
    for edit in edits:
        edit.set_duration(others, vector_ns, Provenance.ASSUMED, spread=_ASSUMED_SPREAD)
        edit.set_gap(np.arange(len(graph)), 0.0)
        edit.remove(faults)
    what = f"{len(layers)} layers on {chip.name}"
    own, dense = (edit.apply(what) for edit in edits)
    notes = *_notes(graph, layers, uncalled), *_order_advice(graph, found, layers, chip)
    return AcceleratorStep(chip, own, dense, tuple(layers), float(vector_ns.sum()), notes)


def recorded_masks(
    graph: Graph, found: Iterable[tuple[Match, LayerShape]]
) -> Iterator[tuple[dict[Operand, NDArray[np.bool_]], int]]:
    """Yield the masks of each layer in the form of its shape, and the number of NaNs."""
    recorded = {(m.module, m.call, m.operand): m for m in graph.statistics.masks}
    calls: Counter[str] = Counter()
    for match, shape in found:
        masks, nans = {}, 0
        for operand, size in shape.shapes.items():
            mask = recorded.get((match.module, calls[match.module], operand.value))
            if mask is None or match.settings.transposed or np.prod(mask.shape) != np.prod(size):
                continue
            bits = mask.unpacked()
            if not match.settings.kernel and operand is not Operand.WEIGHT:
                bits = bits.reshape(-1, mask.shape[-1]).T
            masks[operand] = bits.reshape(size)
            nans += mask.nans
        calls[match.module] += 1
        yield masks, nans


def tasks_of_layer(graph: Graph, match: Match) -> Iterator[tuple[int, list[Pass]]]:
    """Yield the tasks of a layer with the passes that each runs."""
    swapped = {Pass.FORWARD: Pass.INPUT, Pass.INPUT: Pass.FORWARD}
    if not match.settings.transposed:
        swapped = {}
    for task in match.forward:
        yield task, [swapped.get(Pass.FORWARD, Pass.FORWARD)]
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
        yield task, [swapped.get(which, which) for which in run]


def item_bytes(match: Match) -> int:
    return match.x.nbytes // max(match.x.numel, 1)


def _operator_ns(call: Call, chip: Accelerator) -> float:
    """Return the time of an operator that is not a layer, in ns."""
    kind = operator_class(call)
    if kind is OperatorClass.VIEW:
        return 0.0
    if kind is OperatorClass.CONTRACTION:
        done = work(call)
        if done is None or not done.flops:
            raise InvalidArgumentError(
                "accelerator", f"{chip.name} cannot run '{call.name}'",
                remedy="express it as linear layers, convolutions or matmuls",
            )  # fmt: skip
        cycles = done.flops / 2 / chip.array.macs
    else:
        cycles = map_operations(call) / chip.vector_lanes
    memory_s = traffic(call).total / chip.memory.dram_bytes_per_s.value
    return max(cycles / chip.clock_hz.value, memory_s) * 1e9


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


def _notes(graph: Graph, layers: list[LayerCost], uncalled: NDArray[np.int64]) -> Iterator[str]:
    if kept_ns := float(graph.tasks.duration_ns[uncalled].sum()):
        yield f"tasks without an operator keep the host's time: {format_duration(kept_ns)}"
    if not graph.statistics.masks:
        yield f"no masks were recorded, so every layer is dense; record them: {RECORD}"
    elif bare := [x.module for x in layers if all(cost.scheduled is None for cost in x.passes)]:
        yield f"{len(bare)} layers without masks are dense: {', '.join(bare[:3])}"
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


def _order_advice(
    graph: Graph,
    found: Sequence[tuple[Match, LayerShape]],
    layers: Sequence[LayerCost],
    chip: Accelerator,
) -> Iterator[str]:
    """Yield what another order of channels would save in the longest layers."""
    cycles = [sum(cost.cycles for cost in layer.passes) for layer in layers]
    longest = sorted(range(len(layers)), key=cycles.__getitem__)[-_ORDERED_LAYERS:]
    saved: dict[str, float] = {}
    before = after = 0
    for number, (masks, _) in enumerate(recorded_masks(graph, found)):
        if number in longest and masks:
            layer = layers[number]
            run = [cost.which for cost in layer.passes]
            recorded, best = best_order(layer.shape, masks, run, chip)
            before, after = before + recorded, after + best
            saved[layer.module or "the model"] = 1 - best / max(recorded, 1)
    if saved and 1 - after / max(before, 1) >= _FEW_ZEROS:
        module = max(saved, key=saved.__getitem__)
        yield (
            f"sorting channels by their zeros saves {1 - after / before:.0%} of the cycles of the "
            f"{len(saved)} longest layers, {saved[module]:.0%} in {module}; results stay the same"
        )


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


def ratio(new: float, old: float) -> float:
    """Return `new` / `old`; 1 if `old` is 0, since all energies may be described as 0."""
    return new / old if old else 1.0


def sensitivity(step: AcceleratorStep) -> dict[str, tuple[float, float]]:
    """Return by constant the relative changes of time and energy of the layers if it is doubled."""
    time_ns = sum(cost.time_ns for layer in step.layers for cost in layer.passes)
    energy = sum(energy_pj(step))
    chips, changes = Chips.of(step.chip), {}
    for name in ("clock_hz", "dram_bytes_per_s", *vars(step.chip.energy)):
        doubled = {name: float(2 * getattr(chips, name)[0])}
        other = Chips.of(step.chip, **doubled)
        new_ns = sum(float(c.cost.time_ns(other)[0]) for layer in step.layers for c in layer.passes)
        new_energy = sum(energy_pj(step, changes=doubled))
        changes[name] = ratio(new_ns, time_ns) - 1, ratio(new_energy, energy) - 1
    return changes
