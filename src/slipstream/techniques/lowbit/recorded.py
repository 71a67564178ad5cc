"""Prediction of the forms of activations between low-bit layers, from a recorded step.

`slipstream.techniques.lowbit.handover` determines them by tracing the model; this module predicts
them from the step's operators: which layers and operators read each layer's output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import Call, Graph, StepPhase
from slipstream.graph.flow import Flow, flow_of
from slipstream.techniques.lowbit import cost
from slipstream.techniques.lowbit.cost import Form
from slipstream.techniques.lowbit.timing import concat_call, pool_call
from slipstream.techniques.lowbit.windows import pair
from slipstream.techniques.memory_format import channels_last, is_channels_last

RELUS = ("aten::relu", "aten::relu_")
# Clips that preserve codes, such as a ReLU6.
CLIPS = (*RELUS, "aten::hardtanh", "aten::hardtanh_")
SUMS = ("aten::add", "aten::add_")
POOLS = ("aten::max_pool2d_with_indices", "aten::max_pool2d")
_JOINS = ("aten::cat",)
# Bytes per element of a layer's output.
_BYTES_OF = {Form.CODES: 1, Form.SUM: 5}


@dataclass
class Handover:
    """Changes to the tasks around low-bit layers.

    Attributes:
        reads, writes: forms of each layer's input and output, by its task.
        chains: the layer's task and all tasks fused into it, in order, by its task.
        gone: tasks that are fused or have no cost on codes.
        coded: calls of tasks that work on codes.
        moved: calls of tasks whose images become channels-last, as layers write them.
    """

    reads: dict[int, Form] = field(default_factory=dict)
    writes: dict[int, Form] = field(default_factory=dict)
    chains: dict[int, list[int]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    coded: dict[int, Call] = field(default_factory=dict)
    moved: dict[int, Call] = field(default_factory=dict)


@dataclass
class _Reach:
    """Final readers of a value: layers, tasks on the way to them, sums, and whether others do."""

    layers: list[int] = field(default_factory=list)
    through: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    others: bool = False


def handover(graph: Graph, fused: Mapping[int, Sequence[int]], bits: Mapping[int, int]) -> Handover:
    """Predict the forms of activations.

    Args:
        fused: the following tasks that are fused into each layer, by the layer's task.
        bits: bits of each layer's input, by the layer's task.
    """
    flow = flow_of(graph)
    forms = Handover(
        gone={task for tasks in fused.values() for task in tasks},
        chains={task: [task, *tasks] for task, tasks in fused.items()},
    )
    outputs = {task: tasks[-1] if tasks else task for task, tasks in fused.items()}
    reaches = {task: _reach(flow, end, bits) for task, end in outputs.items()}
    summing = {
        task: reach.sums[0]
        for task, reach in reaches.items()
        # A layer that clips its output cannot add a term before the clip.
        if flow.name(outputs[task]) not in CLIPS and _can_fuse_sum(flow, reach)
    }
    # Of two layers whose outputs are added, the maker of the first operand fuses the sum.
    by_total: dict[int, int] = {}
    for task, total in summing.items():
        first = flow.makers[total][0]
        if total not in by_total or first == outputs[task]:
            by_total[total] = task
    ends = dict(outputs)
    for total, task in by_total.items():
        forms.gone.add(total)
        forms.chains[task].append(total)
        ends[task] = total
        relu = flow.readers[total]
        if len(relu) == 1 and flow.name(relu[0]) in RELUS:
            forms.gone.add(relu[0])
            forms.chains[task].append(relu[0])
            ends[task] = relu[0]
    made_by = {end: task for task, end in ends.items()}
    reaches = {task: _reach(flow, end, bits) for task, end in ends.items()}
    for task, reach in reaches.items():
        adds = ends[task] != outputs[task]
        same_bits = len({bits[reader] for reader in reach.layers}) == 1
        codes_only = bool(reach.layers) and same_bits and not reach.others and not reach.sums
        codes_only = codes_only and all(
            _only_from_layers(flow, through_task, made_by, reaches)
            for through_task in reach.through
        )
        if adds:
            codes = any(_reads_directly(flow, ends[task], reader) for reader in reach.layers)
            forms.writes[task] = Form.SUM if codes else Form.SUM_FLOATS
        elif codes_only:
            codes, forms.writes[task] = True, Form.CODES
            for through_task in reach.through:
                _convert_task(graph, flow, through_task, forms)
        else:
            codes, forms.writes[task] = False, Form.FLOATS
        for reader in reach.layers if codes else ():
            if codes_only or _reads_directly(flow, ends[task], reader):
                forms.reads[reader] = Form.CODES
    _propagate_layout(graph, flow, bits, forms, set(ends.values()))
    return forms


def held(graph: Graph, forms: Handover) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each allocation's bytes and release, with codes instead of float32.

    A layer allocates a single output for all fused tasks, released with the last task's output. A
    fused sum is stored as floats and codes.

    Args:
        forms: result of `handover`.
    """
    memory = graph.memory
    nbytes, release = memory.nbytes.astype(np.float64), memory.release.astype(np.int64)
    outputs_of: dict[int, list[int]] = {}
    for number, producer in enumerate(memory.producer.tolist()):
        outputs_of.setdefault(producer, []).append(number)
    for task, chain in forms.chains.items():
        # A task's largest allocation is its output; others are statistics.
        outputs = [
            max(outputs_of[member], key=lambda number: nbytes[number])
            for member in chain
            if member in outputs_of
        ]
        if not outputs:
            continue
        first, final = outputs[0], outputs[-1]
        size = nbytes[final] * _BYTES_OF.get(forms.writes.get(task, Form.FLOATS), 4) / 4
        nbytes[[number for member in chain for number in outputs_of.get(member, ())]] = 0.0
        nbytes[first], release[first] = size, release[final]
    chained = {member for chain in forms.chains.values() for member in chain}
    for task in (forms.gone - chained) | forms.coded.keys():
        # The first output of a pooling; indices are not computed.
        outputs = outputs_of.get(task, [])
        nbytes[outputs[1:]] = 0.0
        nbytes[outputs[:1]] /= 4
    return np.ceil(nbytes).astype(np.int64), release


def _reach(flow: Flow, task: int, bits: Mapping[int, int]) -> _Reach:
    reach = _Reach()
    pending = [task]
    while pending:
        current = pending.pop()
        readers = flow.readers[current]
        reach.others |= not readers
        for reader in readers:
            name = flow.name(reader)
            if reader in bits and flow.makers[reader][_input(flow, reader)] == current:
                reach.layers.append(reader)
            elif name in (*CLIPS, *POOLS, *_JOINS):
                reach.through.append(reader)
                pending.append(reader)
            elif name in SUMS and len(flow.operands(reader)[0]) == 2 and current == task:
                reach.sums.append(reader)
            else:
                reach.others = True
    return reach


def _input(flow: Flow, task: int) -> int:
    """Return the index of a layer's input among its operands; `addmm` has the bias first."""
    return 1 if flow.name(task) == "aten::addmm" else 0


def _can_fuse_sum(flow: Flow, reach: _Reach) -> bool:
    sole_use = len(reach.sums) == 1 and not (reach.layers or reach.through or reach.others)
    if not sole_use:
        return False
    call = flow.call(reach.sums[0])
    if call is None or call.inputs[0].numel < cost.MIN_SUM_ELEMS:
        return False
    left, right = (spec.shape for spec in call.inputs)
    return len(left) == 4 and left == right


def _reads_directly(flow: Flow, task: int, reader: int) -> bool:
    return flow.makers[reader][_input(flow, reader)] == task


def _only_from_layers(
    flow: Flow, task: int, made_by: Mapping[int, int], reaches: Mapping[int, _Reach]
) -> bool:
    """Return whether the output of `task` derives only from layers that can write codes."""
    if task in made_by:
        reach = reaches[made_by[task]]
        return not (reach.others or reach.sums)
    if task < 0 or flow.name(task) not in (*CLIPS, *POOLS, *_JOINS):
        return False
    return all(_only_from_layers(flow, maker, made_by, reaches) for maker in flow.makers[task])


def _convert_task(graph: Graph, flow: Flow, task: int, found: Handover) -> None:
    """Record the call of `task` on codes, or remove it."""
    call = flow.call(task)
    assert call is not None
    if call.name in CLIPS:
        found.gone.add(task)
        return
    batch, channels, height, width = (*call.inputs[0].shape, 1, 1)[:4]
    if call.name in _JOINS:
        found.coded[task] = concat_call(
            (batch, height, width), tuple(spec.shape[1] for spec in call.inputs)
        )
    else:
        found.coded[task] = pool_call((batch, height, width, channels), *window_of(call))


def window_of(call: Call) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Return a pooling's kernel, stride, padding and dilation, and whether sizes are rounded up."""
    kernel, stride, padding, dilation = call.arguments[1:5]
    # The default stride is the kernel size.
    return tuple(map(pair, (kernel, stride or kernel, padding, dilation))), call.arguments[5]


def _propagate_layout(
    graph: Graph, flow: Flow, layers: Iterable[int], found: Handover, ends: set[int]
) -> None:
    """Record calls on images that layers make channels-last.

    An image that reaches a layer in another order is copied by it.
    """
    ordered: set[int] = set()
    layers = set(layers)
    computes = flow.complete & ~flow.views & (graph.tasks.phase != StepPhase.OPTIMIZER)
    for task in np.flatnonzero(computes).tolist():
        call = flow.call(task)
        assert call is not None
        ordered_inputs = [
            maker in ordered and len(spec.shape) == 4
            for maker, spec in zip(flow.makers[task], call.inputs, strict=True)
        ]
        if task in layers or task in ends or task in found.gone or task in found.coded:
            ordered.add(task)
            if task in layers and found.reads.get(task) is not Form.CODES:
                spec = call.inputs[0]
                image = len(spec.shape) == 4 and spec.shape[1] > 1 and not is_channels_last(spec)
                found.reads[task] = Form.PLANES if image and not ordered_inputs[0] else Form.FLOATS
            continue
        if not any(ordered_inputs):
            continue
        ordered.add(task)
        specs = [
            channels_last(spec) if is_ordered else spec
            for is_ordered, spec in zip(ordered_inputs, call.inputs, strict=True)
        ]
        if tuple(specs) != call.inputs:
            found.moved[task] = call.with_inputs(specs)
