"""Automatic mixed precision: matrix multiplications and convolutions in 16 bits.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; ``torch.amp.autocast``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.durations import CallChanges, Durations, pace, required_timings, rescale
from slipstream.graph import Call, Editor, Graph, StepPhase, price, price_columns
from slipstream.graph.graph import cached_per_graph
from slipstream.source import Places, Source, refuse_inside
from slipstream.technique import (
    CodeChange,
    Context,
    Quality,
    QualityKind,
    Stage,
    TechniqueSettings,
    Traits,
)
from slipstream.techniques._autocast_memory import edit_memory
from slipstream.techniques._baseline import already_autocast, already_compiled, hidden_model
from slipstream.techniques.autocast import AutocastPlan, plan
from slipstream.workload import BuiltWorkload, Workload

_TORCH_DTYPE = {"bf16": "bfloat16", "fp16": "float16"}
# Names that a file needs to move its model off the CPU.
_DEVICE_NAMES = frozenset({"cuda", "device", "to", "xpu", "mps", "set_default_device"})
_CPU = '"cpu"'
# Losses of probabilities, which torch refuses to compute under autocast on CUDA.
_UNSAFE_LOSSES = frozenset({"BCELoss", "binary_cross_entropy"})
# Autocast casts its inputs even if the processor does not support it in bfloat16. Other layers,
# such as convolutions, fall back to torch's kernels.
_ONEDNN_RECURRENT = "aten::mkldnn_rnn_layer"


@dataclass(frozen=True)
class Amp(TechniqueSettings):
    """Run the model's forward under autocast, with parameters and optimizer in float32.

    ``amp:bf16`` (the default) has float32's range and needs no loss scaling.
    """

    dtype: Literal["bf16", "fp16"] = "bf16"

    name: ClassVar[str] = "amp"
    traits: ClassVar[Traits] = Traits(stage=Stage.PRECISION)
    effect: ClassVar[Quality] = Quality(
        QualityKind.ROUNDING, "Micikevicius et al. 2018: same accuracy over many models"
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why autocast has no effect on this step; None if it has."""
        if self.dtype == "fp16":
            return "fp16 needs loss scaling and a GPU; use amp:bf16"
        reason = already_autocast(graph) or already_compiled(graph) or hidden_model(graph)
        if reason is not None:
            return reason
        if any(spec.dtype in _TORCH_DTYPE.values() for call in graph.calls for spec in call.inputs):
            return "the step already computes in 16 bits"
        casting = self._plan(graph)
        if not casting.lowered:
            return "no operator of the step runs in lower precision under autocast"
        if not casting.changed:
            return "autocast lowers float32 only, and no operator here computes in it"
        recurrent = any(call.name == _ONEDNN_RECURRENT for call in casting.changed.values())
        if recurrent and not onednn_has_bf16():
            return "oneDNN has no LSTM in bfloat16 for this processor, so torch would fail"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Call]:
        """Return changed operators as recorded and in their new dtypes, and the casts."""
        casting = self._plan(graph)
        return [*required_timings(graph, _changed(graph, casting)), *casting.table.calls]

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Scale each changed operator by its micro-benchmarked ratio; insert the casts."""
        casting = self._plan(graph)
        edit = Editor(graph, str(self))
        changed = _changed(graph, casting)
        rescale(edit, graph, changed, context.durations)
        in_step = pace(graph, changed.tasks, context.durations)
        handles = _insert(edit, graph, casting, context.durations, in_step)
        edit_memory(edit, graph, casting, changed, handles, context.durations)
        return edit.apply(
            f"{casting.lowered} forward operators in {self.dtype}, {len(casting.casts)} casts"
        )

    def apply(self, built: BuiltWorkload) -> None:
        """Wrap the model's forward in autocast; its floating-point outputs are cast to float32.

        Raises:
            WorkloadError: the step hides its model.
        """
        import torch

        built.need_model(self.name)
        device = next((p.device.type for p in built.model.parameters()), "cpu")
        # Setting the attribute on Lightning Fabric's wrapper would set it on the wrapped module.
        vars(built.model)["forward"] = under_autocast(
            built.model.forward, device, getattr(torch, _TORCH_DTYPE[self.dtype])
        )

    def code(self, workload: Workload) -> CodeChange | None:
        """Return autocast around the forward pass and the loss, or an inference script's calls."""
        return CodeChange.of(
            workload, self._edit, by_hand=self._by_hand, note=self._note, technique=self
        )

    def _note(self, where: Places) -> str:
        if where.only_infers:
            return (
                f"the model's output is {_TORCH_DTYPE[self.dtype]} after this edit; in the trial "
                "it is cast to float32"
            )
        note = (
            "the loss is also computed under autocast, in float32 for the losses of torch; in the "
            "trial the model's output is first cast to float32"
        )
        if where.function is None and len(where.models) > 1:
            note += f"; the prediction and the trial change one of {len(where.models)} models"
        return note

    def _by_hand(self, where: Places) -> str:
        device = _device(where.source).format(model="model")
        header = f"with torch.autocast({device}, dtype=torch.{_TORCH_DTYPE[self.dtype]}):\n"
        if where.only_infers:
            return f"{header}    output = model(inputs)\noutput = output.float()"
        if _names_of(where.source) & _UNSAFE_LOSSES:
            loss = "loss = loss_function(output.float(), targets)"
            return f"{header}    output = model(inputs)\n{loss}"
        return f"{header}    loss = loss_function(model(inputs), targets)\nloss.backward()"

    def _edit(self, where: Places) -> Source:
        if self.dtype == "fp16":
            raise where.source.location_error("float16 needs loss scaling")
        dtype = f"{where.torch}.{_TORCH_DTYPE[self.dtype]}"
        device = _device(where.source)
        if (
            device != _CPU
            and not where.only_infers
            and (unsafe := _UNSAFE_LOSSES & _names_of(where.source))
        ):
            raise where.source.location_error(f"{min(unsafe)} fails under autocast on a GPU")
        autocast = f"{{torch}}.autocast({device}, dtype={dtype})"
        if where.function is None:
            for forward in where.forwards:
                refuse_inside(where.source, forward, "autocast")
            if where.only_infers and "numpy" in where.source.names.attributes:
                raise where.source.location_error(
                    f"the script converts tensors to NumPy, which has no {_TORCH_DTYPE[self.dtype]}"
                )
            return where.wrap_forward(f"with {autocast}:")
        where = where.with_named_model()
        lines = [f"{{model}}.forward = {autocast}({{model}}.forward)"]
        loss = where.returned.get("loss")
        if loss is None:
            return where.before_return(*lines)
        if isinstance(loss, ast.Call):
            # Wrapped in place, so that random numbers drawn by its construction are unchanged.
            call = autocast.replace("{torch}", where.torch)
            name = where.source.segment(where.returned.fields["model"])
            return where.before_return(*lines).surround(
                loss, call.replace("{model}", name) + "(", ")"
            )
        under = where.source.fresh_name("loss", "criterion", "loss_function")
        lines.append(f"{under} = {autocast}({where.source.segment(loss)})")
        return where.before_return(*lines).replace(loss, under)

    def _plan(self, graph: Graph) -> AutocastPlan:
        return plan(graph, _TORCH_DTYPE[self.dtype], str(graph.meta.get("device", "cpu")))


def _names_of(source: Source) -> set[str]:
    return source.names.used | source.names.attributes


def _device(source: Source) -> str:
    """Return source text of the model's device, which is read from a model that may be moved."""
    moved = _DEVICE_NAMES & _names_of(source)
    return "next({model}.parameters()).device.type" if moved else _CPU


@cached_per_graph
def _changed(graph: Graph, casting: AutocastPlan) -> CallChanges:
    return CallChanges.of(graph, casting.changed)


def _insert(
    edit: Editor, graph: Graph, casting: AutocastPlan, durations: Durations, in_step: float
) -> NDArray[np.int64]:
    """Insert the casts; return their handles."""
    casts = casting.table
    if not casts.calls:
        return np.empty(0, np.int64)
    duration_ns, code, spread = price_columns(
        [
            price(durations, each, each.moved_bytes / _ASSUMED_BYTES_PER_NS, pace=in_step)
            for each in casts.calls
        ]
    )
    call = np.array([edit.call_number(each) for each in casts.calls])
    gap_ns = np.array(list(_between_operators_ns(graph).values()))
    return edit.insert_all(
        casts.task, casts.calls[0].name, duration_ns[casts.call], code[casts.call],
        before=casts.before, gap_ns=gap_ns[graph.tasks.phase[casts.task]],
        spread=spread[casts.call], call=call[casts.call],
    )  # fmt: skip


def _between_operators_ns(graph: Graph) -> dict[StepPhase, float]:
    """Return the median gap between outermost operators, by phase.

    A cast is an additional operator to dispatch and, in the backward pass, an additional node for
    autograd to evaluate. In steps of many small operators this takes longer than the copy.
    """
    tasks = graph.tasks
    numbers = {"": 0}
    outermost = np.array(
        [numbers.setdefault(text.partition("/")[0], len(numbers)) for text in graph.strings]
    )[tasks.scope]
    is_boundary = (outermost[:-1] == 0) | (outermost[:-1] != outermost[1:])
    medians = {}
    for phase in StepPhase:
        inside = (tasks.phase[:-1] == phase) & (tasks.phase[1:] == phase)
        gaps = tasks.gap_ns[:-1][inside & is_boundary]
        medians[phase] = float(np.median(gaps)) if len(gaps) else 0.0
    return medians


# For casts without a benchmark: the copy rate of a typical core.
_ASSUMED_BYTES_PER_NS = 8.0


def onednn_has_bf16() -> bool:
    """Whether oneDNN computes in bfloat16 on this processor."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def under_autocast(forward: Callable[..., Any], device: str, dtype: Any) -> Callable[..., Any]:
    """Return `forward` under autocast, with 16-bit outputs cast to float32."""
    import functools

    import torch
    from torch.utils._pytree import tree_map_only

    def widen(tensor: Any) -> Any:
        return tensor.float() if tensor.dtype == dtype else tensor

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            output = forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, widen, output)

    return wrapped
