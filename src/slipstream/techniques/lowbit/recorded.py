"""In which form activations would go from layer to layer, read from a recorded step.

What `slipstream.techniques.lowbit.handover` finds by watching the model run is foreseen here from
the step's operators: who reads what a layer makes, through which operators, and what else does.
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
# As of a ReLU6; codes go through these as through a ReLU.
CLIPS = (*RELUS, "aten::hardtanh", "aten::hardtanh_")
SUMS = ("aten::add", "aten::add_")
POOLS = ("aten::max_pool2d_with_indices", "aten::max_pool2d")
_JOINS = ("aten::cat",)
# Of a number, as a layer gives it.
_BYTES_OF = {Form.CODES: 1, Form.SUM: 5}


@dataclass
class Handover:
    """What becomes of the tasks around low-bit layers.

    Attributes:
        reads, gives: by the layer's task, the form of its input and of its output.
        chains: by the layer's task, it and all tasks whose work it does, in their order.
        gone: tasks whose work layers do, or that bytes make free.
        coded: by task, what it is when it works on codes.
        moved: by task, its call on images in channels-last order, in which layers write them.
    """

    reads: dict[int, Form] = field(default_factory=dict)
    gives: dict[int, Form] = field(default_factory=dict)
    chains: dict[int, list[int]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    coded: dict[int, Call] = field(default_factory=dict)
    moved: dict[int, Call] = field(default_factory=dict)


@dataclass
class _Reach:
    """Who reads a value in the end: layers, through which tasks; sums; whether others do."""

    layers: list[int] = field(default_factory=list)
    through: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    others: bool = False


def handover(
    graph: Graph, behind: Mapping[int, Sequence[int]], bits: Mapping[int, int]
) -> Handover:
    """The forms that activations take.

    Args:
        behind: by the task of each layer, the tasks right behind that become part of it.
        bits: by the task of each layer, those of its input.
    """
    flow = flow_of(graph)
    forms = Handover(
        gone={one for tasks in behind.values() for one in tasks},
        chains={task: [task, *tasks] for task, tasks in behind.items()},
    )
    last = {task: tasks[-1] if tasks else task for task, tasks in behind.items()}
    reaches = {task: _reach(flow, end, bits) for task, end in last.items()}
    summing = {
        task: reach.sums[0]
        for task, reach in reaches.items()
        # What a layer clips before the sum, it cannot add to first.
        if flow.name(last[task]) not in CLIPS and _takes_sum(flow, reach)
    }
    # Of two layers whose outputs are added, the second to run waits for nobody; torch's order says.
    taken: dict[int, int] = {}
    for task, total in summing.items():
        first = flow.makers[total][0]
        if total not in taken or first == last[task]:
            taken[total] = task
    ends = dict(last)
    for total, task in taken.items():
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
        adds = ends[task] != last[task]
        alike = len({bits[reader] for reader in reach.layers}) == 1
        bare = bool(reach.layers) and alike and not reach.others and not reach.sums
        bare = bare and all(_of_layers(flow, one, made_by, reaches) for one in reach.through)
        if adds:
            codes = any(_direct(flow, ends[task], reader) for reader in reach.layers)
            forms.gives[task] = Form.SUM if codes else Form.SUM_FLOATS
        elif bare:
            codes, forms.gives[task] = True, Form.CODES
            for one in reach.through:
                _code(graph, flow, one, forms)
        else:
            codes, forms.gives[task] = False, Form.FLOATS
        for reader in reach.layers if codes else ():
            if bare or _direct(flow, ends[task], reader):
                forms.reads[reader] = Form.CODES
    _order(graph, flow, bits, forms, set(ends.values()))
    return forms


def held(graph: Graph, forms: Handover) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """By allocation of the step, where codes of a byte stand for float32: its bytes, its release.

    A layer makes one output for all that it does, which is there for as long as the last of them
    was. A sum that is handed on is held as floats and codes.

    Args:
        forms: what `handover` says of the layers.
    """
    memory = graph.memory
    nbytes, release = memory.nbytes.astype(np.float64), memory.release.astype(np.int64)
    outputs_of: dict[int, list[int]] = {}
    for number, producer in enumerate(memory.producer.tolist()):
        outputs_of.setdefault(producer, []).append(number)
    for task, chain in forms.chains.items():
        # Of what a task makes, the largest is its output; others are statistics.
        outputs = [
            max(outputs_of[one], key=lambda number: nbytes[number])
            for one in chain
            if one in outputs_of
        ]
        if not outputs:
            continue
        first, last = outputs[0], outputs[-1]
        size = nbytes[last] * _BYTES_OF.get(forms.gives.get(task, Form.FLOATS), 4) / 4
        nbytes[[number for one in chain for number in outputs_of.get(one, ())]] = 0.0
        nbytes[first], release[first] = size, release[last]
    chained = {one for chain in forms.chains.values() for one in chain}
    for task in (forms.gone - chained) | forms.coded.keys():
        # The first of a maximum's outputs; where each was found is not asked.
        outputs = outputs_of.get(task, [])
        nbytes[outputs[1:]] = 0.0
        nbytes[outputs[:1]] /= 4
    return np.ceil(nbytes).astype(np.int64), release


def _reach(flow: Flow, task: int, bits: Mapping[int, int]) -> _Reach:
    reach = _Reach()
    waiting = [task]
    while waiting:
        one = waiting.pop()
        readers = flow.readers[one]
        reach.others |= not readers
        for reader in readers:
            name = flow.name(reader)
            if reader in bits and flow.makers[reader][_input(flow, reader)] == one:
                reach.layers.append(reader)
            elif name in (*CLIPS, *POOLS, *_JOINS):
                reach.through.append(reader)
                waiting.append(reader)
            elif name in SUMS and len(flow.operands(reader)[0]) == 2 and one == task:
                reach.sums.append(reader)
            else:
                reach.others = True
    return reach


def _input(flow: Flow, task: int) -> int:
    """Which operand of a layer is its input: the bias comes first in one."""
    return 1 if flow.name(task) == "aten::addmm" else 0


def _takes_sum(flow: Flow, reach: _Reach) -> bool:
    only = len(reach.sums) == 1 and not (reach.layers or reach.through or reach.others)
    if not only:
        return False
    call = flow.call(reach.sums[0])
    if call is None or call.inputs[0].numel < cost.LEAST_SUM:
        return False
    one, other = (spec.shape for spec in call.inputs)
    return len(one) == 4 and one == other


def _direct(flow: Flow, task: int, reader: int) -> bool:
    return flow.makers[reader][_input(flow, reader)] == task


def _of_layers(
    flow: Flow, task: int, made_by: Mapping[int, int], reaches: Mapping[int, _Reach]
) -> bool:
    """Whether all that `task` gives comes from layers that need not give floats."""
    if task in made_by:
        reach = reaches[made_by[task]]
        return not (reach.others or reach.sums)
    if task < 0 or flow.name(task) not in (*CLIPS, *POOLS, *_JOINS):
        return False
    return all(_of_layers(flow, maker, made_by, reaches) for maker in flow.makers[task])


def _code(graph: Graph, flow: Flow, task: int, found: Handover) -> None:
    """What `task` is when it works on codes."""
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
    """Kernel, stride, padding and dilation of a maximum; and whether sizes are rounded up."""
    kernel, stride, padding, dilation = call.arguments[1:5]
    # Without a stride windows lie side by side.
    return tuple(map(pair, (kernel, stride or kernel, padding, dilation))), call.arguments[5]


def _order(
    graph: Graph, flow: Flow, layers: Iterable[int], found: Handover, ends: set[int]
) -> None:
    """Which images lie in channels-last order, since a layer or what follows one has written them.

    An image that reaches a layer in another order is copied there.
    """
    ordered: set[int] = set()
    layers = set(layers)
    moves = flow.complete & ~flow.views & (graph.tasks.phase != StepPhase.OPTIMIZER)
    for task in np.flatnonzero(moves).tolist():
        call = flow.call(task)
        assert call is not None
        here = [
            maker in ordered and len(spec.shape) == 4
            for maker, spec in zip(flow.makers[task], call.inputs, strict=True)
        ]
        if task in layers or task in ends or task in found.gone or task in found.coded:
            ordered.add(task)
            if task in layers and found.reads.get(task) is not Form.CODES:
                spec = call.inputs[0]
                image = len(spec.shape) == 4 and spec.shape[1] > 1 and not is_channels_last(spec)
                found.reads[task] = Form.PLANES if image and not here[0] else Form.FLOATS
            continue
        if not any(here):
            continue
        ordered.add(task)
        specs = [
            channels_last(spec) if one else spec
            for one, spec in zip(here, call.inputs, strict=True)
        ]
        if tuple(specs) != call.inputs:
            found.moved[task] = call.with_inputs(specs)
