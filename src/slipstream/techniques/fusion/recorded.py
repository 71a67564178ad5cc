"""Regions of a recorded step, and the calls that their kernels are timed by.

A recorded dropout consists of a draw, a division and a multiplication. In a region it is a single
operator that draws from a seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from slipstream.graph import Call, Graph, StepPhase, TensorSpec
from slipstream.graph.call import decode, encode
from slipstream.graph.graph import cached_per_graph
from slipstream.graph.operations import Operation, operations_of
from slipstream.graph.traffic import short_name, traffic
from slipstream.surgery.fx import Source
from slipstream.techniques.fusion.lowering import DROPOUT, Region, RegionOp, lower
from slipstream.techniques.fusion.regions import Found, find

if TYPE_CHECKING:
    from slipstream.codegen.rows_kernels import RowKernel

_DROPOUT = "slipstream::dropout(Tensor x, Tensor seed, float p) -> Tensor"
_FUSED = "slipstream::fused(str steps, Tensor[] read) -> Tensor[]"
_PARTS = (StepPhase.FORWARD, StepPhase.BACKWARD)


@dataclass(frozen=True)
class RecordedRegion:
    """Tasks that a single kernel would replace.

    Attributes:
        tasks: in order, including those that only draw a mask.
        call: the call of the kernel, which timings are requested by.
    """

    tasks: tuple[int, ...]
    call: Call


@cached_per_graph
def recorded_regions(graph: Graph) -> list[RecordedRegion]:
    """Return the regions of the forward and backward pass that can be lowered to loops."""
    operations, lasting = operations_of(graph)
    operations = [operation for operation in operations if operation.part in _PARTS]
    steps, extra = _steps(graph, operations)
    # A draw belongs to its multiplication, wherever that is.
    plain = [
        replace(operation, reads=tuple((v, n) for v, n in operation.reads if v in step.inputs))
        for operation, step in zip(operations, steps, strict=True)
    ]
    partition: Found = find(plain, steps, lasting)
    regions = []
    for region, members in zip(partition.regions, partition.members, strict=True):
        tasks = sorted(
            {operations[n].task for n in members} | {t for n in members for t in extra.get(n, ())}
        )
        regions.append(RecordedRegion(tuple(tasks), fused_call(region)))
    # A mask is drawn once, in the forward pass, and read by two regions; the first region owns it.
    owned: set[int] = set()
    disjoint = []
    for recorded in sorted(regions, key=lambda recorded: recorded.tasks[-1]):
        own = tuple(task for task in recorded.tasks if task not in owned)
        owned |= set(own)
        disjoint.append(replace(recorded, tasks=own))
    return disjoint


def _steps(
    graph: Graph, operations: Sequence[Operation]
) -> tuple[list[RegionOp], dict[int, tuple[int, ...]]]:
    """Return a step per operation, and by operation the tasks that drew its dropout mask."""
    drawn: dict[int, tuple[float, int, tuple[int, ...]]] = {}
    steps: list[RegionOp] = []
    extra: dict[int, tuple[int, ...]] = {}
    for number, operation in enumerate(operations):
        call = operation.call
        name = short_name(call)
        inputs = _values(operation)
        outputs = tuple(v for v, _ in operation.writes)
        step = RegionOp(call, inputs, outputs, _direct_sources(inputs, call))
        if len(inputs) != len(call.inputs) or len(outputs) != len(call.outputs):
            step = RegionOp(Call("slipstream::unknown()", (), ()), (), (), ())
        elif name == "bernoulli" and outputs:
            p = round(1.0 - float(call.arguments[1]), 12) if _is_number(call, 1) else 0.0
            drawn[outputs[0]] = p, outputs[0], (operation.task,)
        elif name == "div" and inputs and inputs[0] in drawn and outputs:
            p, seed, tasks = drawn[inputs[0]]
            drawn[outputs[0]] = p, seed, (*tasks, operation.task)
        elif name == "mul" and outputs and any(v in drawn for v in inputs):
            place = next(n for n, v in enumerate(inputs) if v in drawn)
            p, seed, tasks = drawn[inputs[place]]
            x, spec = inputs[1 - place], call.inputs[1 - place]
            seeded = TensorSpec("int64", (2,), (1,), spec.device)
            drop = Call(_DROPOUT, (spec, seeded, p), call.outputs)
            step = RegionOp(drop, (x, -1 - seed), outputs, _direct_sources((x, -1 - seed), drop))
            extra[number] = tasks
        steps.append(step)
    return steps, extra


def _direct_sources(inputs: Sequence[int], call: Call) -> tuple[Source, ...]:
    """Return the inputs themselves: a recorded call does not show which tensors they view."""
    return tuple(Source(v, spec) for v, spec in zip(inputs, call.inputs, strict=False))


def _is_number(call: Call, place: int) -> bool:
    return len(call.arguments) > place and isinstance(call.arguments[place], (int, float))


def _values(operation: Operation) -> tuple[int, ...]:
    """Return the value of each input of a call; -1 for an input that it only overwrites.

    Empty if an edit inserted the call without its operands.
    """
    moved = traffic(operation.call).reads
    if sum(n > 0 for n in moved) != len(operation.reads):
        return ()
    reads = iter(operation.reads)
    return tuple(next(reads)[0] if n else -1 for n in moved)


def fused_call(region: Region) -> Call:
    """Return the call of a region's kernel; its argument describes the operators."""
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
    """Return the region of a `fused_call`.

    Raises:
        UnsupportedError: the region cannot be lowered to loops.
    """
    rows, makes = json.loads(call.arguments[0])
    steps = [
        RegionOp(call, tuple(ins), tuple(outs), _direct_sources(ins, call))
        for op, arguments, specs, ins, outs in rows
        for call in [Call(op, tuple(decode(arguments)), tuple(decode(specs)))]
    ]
    return lower(steps, makes)


# Kernels that were compiled together and have not been timed yet, by `Call.key`.
_compiled: dict[str, RowKernel] = {}


def compile_together(calls: Sequence[Call]) -> None:
    """Compile kernels together, which takes a third of the time of compiling each alone.

    Raises:
        UnsupportedError: a call cannot be lowered to loops.
        CompileError: the compiler is missing, or fails.
    """
    from slipstream.codegen.rows_kernels import row_kernels

    kernels = row_kernels([region_of(call).nest for call in calls])
    _compiled.update(zip((call.key for call in calls), kernels, strict=True))


def timer(call: Call) -> Callable[[], object]:
    """Return a function that runs the kernel on random inputs, for the micro-benchmark."""
    from slipstream.codegen.rows_kernels import row_kernels

    region = region_of(call)
    kernel = _compiled.pop(call.key, None) or row_kernels([region.nest])[0]
    # In a step, too, the previous operator has just written the inputs.
    inputs = [_random(spec) for spec in region.nest.inputs]
    return lambda: kernel(*inputs)


def _random(spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    tensor = torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device=spec.device)
    if not dtype.is_floating_point:
        return tensor.random_(0, 2) if dtype is not torch.int64 else tensor.random_()
    return tensor.copy_(torch.randn(spec.shape))


__all__ = ["DROPOUT", "RecordedRegion", "fused_call", "recorded_regions", "region_of", "timer"]
