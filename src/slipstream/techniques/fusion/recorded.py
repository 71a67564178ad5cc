"""Regions of a recorded step: what would be fused, and what to ask its duration by.

Dropout is recorded as it runs, as a draw, a division and a multiplication by what was drawn; in a
region it is the one operator that draws from a seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from slipstream.durations.movement import Operation, operations_of
from slipstream.durations.traffic import short_name, traffic
from slipstream.graph import Call, Graph, StepPhase, TensorSpec
from slipstream.graph.call import decode, encode
from slipstream.graph.graph import kept
from slipstream.techniques.fusion.lowering import DROPOUT, Region, RegionOp, Source, lower
from slipstream.techniques.fusion.regions import Found, find

if TYPE_CHECKING:
    from slipstream.techniques.fusion.kernels import Kernel

_DROPOUT = "slipstream::dropout(Tensor x, Tensor seed, float p) -> Tensor"
_FUSED = "slipstream::fused(str steps, Tensor[] read) -> Tensor[]"
_PARTS = (StepPhase.FORWARD, StepPhase.BACKWARD)


@dataclass(frozen=True)
class RecordedRegion:
    """Tasks that would be one kernel.

    Attributes:
        tasks: in order; with those that only draw a mask.
        call: of the kernel: what its duration is asked by.
        storages: of the call's tensors, -1 where unknown.
    """

    tasks: tuple[int, ...]
    call: Call


@kept
def recorded_regions(graph: Graph) -> list[RecordedRegion]:
    """The regions of a step's forward and backward passes that have loops."""
    operations, lasting = operations_of(graph)
    operations = [one for one in operations if one.part in _PARTS]
    steps, extra = _steps(graph, operations)
    # What draws is a part of its multiplication, wherever that is.
    plain = [
        replace(one, reads=tuple((v, n) for v, n in one.reads if v in step.inputs))
        for one, step in zip(operations, steps, strict=True)
    ]
    partition: Found = find(plain, steps, lasting)
    regions = []
    for region, members in zip(partition.regions, partition.members, strict=True):
        tasks = sorted(
            {operations[n].task for n in members} | {t for n in members for t in extra.get(n, ())}
        )
        regions.append(RecordedRegion(tuple(tasks), fused_call(region)))
    # A mask is drawn once, forward, and read by two regions: the first has it.
    taken: set[int] = set()
    apart = []
    for one in sorted(regions, key=lambda region: region.tasks[-1]):
        left = tuple(task for task in one.tasks if task not in taken)
        taken |= set(left)
        apart.append(replace(one, tasks=left))
    return apart


def _steps(
    graph: Graph, operations: Sequence[Operation]
) -> tuple[list[RegionOp], dict[int, tuple[int, ...]]]:
    """Each operation as a step, and by number the tasks that drew a dropout's mask."""
    drawn: dict[int, tuple[float, int, tuple[int, ...]]] = {}
    steps: list[RegionOp] = []
    extra: dict[int, tuple[int, ...]] = {}
    for number, one in enumerate(operations):
        call = one.call
        name = short_name(call)
        inputs = _values(one)
        outputs = tuple(v for v, _ in one.writes)
        step = RegionOp(call, inputs, outputs, _as_they_are(inputs, call))
        if len(inputs) != len(call.inputs) or len(outputs) != len(call.outputs):
            step = RegionOp(Call("slipstream::unknown()", (), ()), (), (), ())
        elif name == "bernoulli" and outputs:
            p = round(1.0 - float(call.arguments[1]), 12) if _is_number(call, 1) else 0.0
            drawn[outputs[0]] = p, outputs[0], (one.task,)
        elif name == "div" and inputs and inputs[0] in drawn and outputs:
            p, seed, tasks = drawn[inputs[0]]
            drawn[outputs[0]] = p, seed, (*tasks, one.task)
        elif name == "mul" and outputs and any(v in drawn for v in inputs):
            place = next(n for n, v in enumerate(inputs) if v in drawn)
            p, seed, tasks = drawn[inputs[place]]
            x, spec = inputs[1 - place], call.inputs[1 - place]
            seeded = TensorSpec("int64", (2,), (1,), spec.device)
            drop = Call(_DROPOUT, (spec, seeded, p), call.outputs)
            step = RegionOp(drop, (x, -1 - seed), outputs, _as_they_are((x, -1 - seed), drop))
            extra[number] = tasks
        steps.append(step)
    return steps, extra


def _as_they_are(inputs: Sequence[int], call: Call) -> tuple[Source, ...]:
    """Of a recorded call it is not told where its inputs lie in what was made."""
    return tuple(Source(v, spec) for v, spec in zip(inputs, call.inputs, strict=False))


def _is_number(call: Call, place: int) -> bool:
    return len(call.arguments) > place and isinstance(call.arguments[place], (int, float))


def _values(one: Operation) -> tuple[int, ...]:
    """The value of each of a call's inputs, also of those that it only overwrites.

    None at all where an edit of the graph has put a call in whose operands are not told.
    """
    moved = traffic(one.call).reads
    if sum(n > 0 for n in moved) != len(one.reads):
        return ()
    reads = iter(one.reads)
    return tuple(next(reads)[0] if n else -1 for n in moved)


def fused_call(region: Region) -> Call:
    """What a kernel's duration is asked by: its operators, from which it is generated again."""
    numbers: dict[Any, int] = {}

    def number(value: Any) -> int:
        return numbers.setdefault(value, len(numbers))

    rows = [
        [
            step.call.op, encode(step.call.arguments), encode(step.call.outputs),
            [number(v) for v in step.inputs], [number(v) for v in step.outputs],
        ]
        for step in region.steps
    ]  # fmt: skip
    text = json.dumps([rows, [number(v) for v in region.makes]], separators=(",", ":"))
    nest = region.nest
    return Call(_FUSED, (text, tuple(nest.inputs)), tuple(nest.outputs))


def region_of(call: Call) -> Region:
    """The region of a `fused_call`.

    Raises:
        UnsupportedError: it has no loops.
    """
    rows, makes = json.loads(call.arguments[0])
    steps = [
        RegionOp(call, tuple(ins), tuple(outs), _as_they_are(ins, call))
        for op, given, specs, ins, outs in rows
        for call in [Call(op, tuple(decode(given)), tuple(decode(specs)))]
    ]
    return lower(steps, makes)


# By `Call.key`: kernels that were compiled together and are yet to be timed.
_compiled: dict[str, Kernel] = {}


def compile_together(calls: Sequence[Call]) -> None:
    """Compile kernels in one go: alone each takes three times as long, for what it includes.

    Raises:
        UnsupportedError: a call has no loops.
        CompileError: the compiler is not there, or fails.
    """
    from slipstream.techniques.fusion.kernels import by_device

    kernels = by_device([region_of(call) for call in calls])
    _compiled.update(zip((call.key for call in calls), kernels, strict=True))


def timer(call: Call) -> Callable[[], object]:
    """The kernel as a function of nothing, on random numbers, as the micro-benchmark calls it."""
    from slipstream.techniques.fusion.kernels import by_device

    region = region_of(call)
    kernel = _compiled.pop(call.key, None) or by_device([region])[0]
    # As in a step, where the operator before has just made what it reads.
    given = [_random(spec) for spec in region.nest.inputs]
    return lambda: kernel(*given)


def _random(spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    tensor = torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device=spec.device)
    if not dtype.is_floating_point:
        return tensor.random_(0, 2) if dtype is not torch.int64 else tensor.random_()
    return tensor.copy_(torch.randn(spec.shape))


__all__ = ["DROPOUT", "RecordedRegion", "fused_call", "recorded_regions", "region_of", "timer"]
