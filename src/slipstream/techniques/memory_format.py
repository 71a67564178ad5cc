"""channels_last: store images as NHWC in memory, which convolution kernels prefer.

Source: PyTorch's memory formats (``torch.channels_last``); the logical shape stays NCHW.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from slipstream.durations import CallChanges, required_timings, rescale
from slipstream.graph import Call, Editor, Graph, StepPhase, TensorSpec
from slipstream.graph.graph import cached_per_graph
from slipstream.source import AlreadyAppliedError, Places, Source, value_of
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.techniques._baseline import already_compiled, hidden_model
from slipstream.techniques._workspaces import measured_workspaces, resize_workspaces
from slipstream.workload import BuiltWorkload, Workload

_CONVOLUTIONS = ("aten::convolution", "aten::_convolution", "aten::mkldnn_convolution")
_CLONE = "aten::clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor"
_CONTIGUOUS = 0
_FORMAT = "channels_last"


@dataclass(frozen=True)
class ChannelsLast(TechniqueSettings):
    """Store weights, inputs and activations of convolutional models in channels-last order."""

    name: ClassVar[str] = "channels_last"
    traits: ClassVar[Traits] = Traits(stage=Stage.MODEL)
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "the same operators; sums may round differently"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why the memory format has no effect; None if it has."""
        if (reason := already_compiled(graph) or hidden_model(graph)) is not None:
            return reason
        images = [
            call
            for call in graph.calls
            if call.name in _CONVOLUTIONS and len(call.inputs[0].shape) == 4
        ]
        if not images:
            return "the step has no two-dimensional convolution"
        if all(is_channels_last(call.inputs[0]) for call in images):
            return "its convolutions already run in channels_last"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return every operator on images, as recorded and in channels-last, and the copies."""
        changed, copies = _plan(graph)
        return [*required_timings(graph, changed), *(copy for _, copy in copies.pairs)]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Scale operators on images by their micro-benchmarked ratio, and insert copies back."""
        changed, copies = _plan(graph)
        edit = Editor(graph, str(self))
        rescale(edit, graph, changed, context.durations)
        for number, (_, call) in enumerate(copies.pairs):
            answer = context.durations.lookup(call)
            if answer is not None:
                edit.insert_all(
                    copies.tasks[copies.pair == number], call.name, answer.nanoseconds,
                    answer.provenance, before=True, spread=answer.spread,
                    call=edit.call_number(call),
                )  # fmt: skip
        if len(graph.memory):
            # The channels-last kernel has a different workspace.
            needs = measured_workspaces(context.durations, (call for _, call in changed.pairs))
            resize_workspaces(edit, graph, changed.tasks, needs[changed.pair])
        return edit.apply(f"{len(changed)} operators on images, {len(copies)} copies back")

    def apply(self, built: BuiltWorkload) -> None:
        """Convert the weights once, and the images of every batch before the forward pass.

        Raises:
            WorkloadError: the step hides its model.
        """
        import torch
        from torch.utils._pytree import tree_map_only

        built.need_model(self.name)

        def convert(tensor: Any) -> Any:
            return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

        def before(module: Any, args: Any, kwargs: Any) -> Any:
            return tree_map_only(torch.Tensor, convert, (args, kwargs))

        built.model.to(memory_format=torch.channels_last)
        built.batch = tree_map_only(torch.Tensor, convert, built.batch)
        # For batches created inside the step; free for those converted above.
        built.model.register_forward_pre_hook(before, with_kwargs=True)

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the conversion of the model, and of its input."""
        return CodeChange.of(
            workload,
            _edit,
            by_hand="model = model.to(memory_format=torch.channels_last)\n"
            "inputs = inputs.to(memory_format=torch.channels_last)",
            note="the input must be a batch of images, with four dimensions",
            technique=self,
        )


def _edit(where: Places) -> Source:
    where = where.with_named_model()
    source, inputs = where.source, where.inputs
    conversion = ".to(memory_format={torch}.channels_last)"
    if _FORMAT not in source.segment(where.model.statement):
        with contextlib.suppress(AlreadyAppliedError):
            source = where.after_model("{model} = {model}" + conversion)
    for node in inputs:
        value = value_of(source, node)
        if _FORMAT not in source.segment(node) + (source.segment(value) if value else ""):
            source = source.surround(node, "", conversion.replace("{torch}", where.torch))
    if source is where.source:
        raise source.already_applied("model and input are in channels_last", where.model.statement)
    return source.with_import("torch")


@cached_per_graph
def _plan(graph: Graph) -> tuple[CallChanges, CallChanges]:
    """Return tasks with calls on channels-last images, and views that first need a copy."""
    changed: dict[int, Call] = {}
    copies: dict[int, Call] = {}
    # By recorded call and the inputs that are images; many tasks share a call.
    converted: dict[tuple[int, tuple[bool, ...]], Call] = {}
    copy_of: dict[int, Call] = {}
    images: set[int] = set()
    for t in range(len(graph)):
        task = graph.task(t)
        call = task.call
        if call is None or task.phase == StepPhase.OPTIMIZER:
            continue
        inputs, outputs = task.operands
        if call.name in _CONVOLUTIONS:
            # Weights and the batch are converted at the latest here.
            images.update(
                s for s, spec in zip(inputs, call.inputs, strict=True) if len(spec.shape) == 4
            )
        here = [
            s in images and len(spec.shape) == 4
            for s, spec in zip(inputs, call.inputs, strict=True)
        ]
        if not any(here):
            images.difference_update(outputs)
            continue
        is_view = len(inputs) == 1 and all(out == inputs[0] for out in outputs)
        if is_view:
            if any(len(spec.shape) != 4 for spec in call.outputs) and _matters(call.inputs[0]):
                spec = channels_last(call.inputs[0])
                copy = Call(_CLONE, (spec, _CONTIGUOUS), (call.inputs[0],))
                copies[t] = copy_of.setdefault(int(graph.tasks.call[t]), copy)
                images.discard(inputs[0])
            continue
        specs = [
            channels_last(spec) if image else spec
            for image, spec in zip(here, call.inputs, strict=True)
        ]
        if tuple(specs) != call.inputs:
            key = int(graph.tasks.call[t]), tuple(here)
            if key not in converted:
                converted[key] = call.with_inputs(specs)
            changed[t] = converted[key]
        for spec, storage in zip(call.outputs, outputs, strict=False):
            if len(spec.shape) == 4:
                images.add(storage)
            elif storage not in inputs:
                images.discard(storage)
    return CallChanges.of(graph, changed), CallChanges.of(graph, copies)


def _matters(spec: TensorSpec) -> bool:
    """Whether the two formats differ in memory: several channels and several pixels."""
    _, channels, height, width = spec.shape
    return channels > 1 and height * width > 1


def channels_last(spec: TensorSpec) -> TensorSpec:
    """Return the spec of an NCHW image in channels-last order."""
    _, c, h, w = spec.shape
    return replace(spec, strides=(h * w * c, 1, w * c, c))


def is_channels_last(spec: TensorSpec) -> bool:
    return _matters(spec) and spec.strides == channels_last(spec).strides
