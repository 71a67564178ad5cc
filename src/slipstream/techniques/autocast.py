"""What autocast would do to a recorded step: an interpretation of its calls in other dtypes.

Autocast changes no code, it intercepts operators: some run in the lower precision and get their
inputs cast, some insist on float32, a few take the widest of their inputs; all others follow what
they are given. Walking the recorded calls in order with the dtype each storage *would* have gives
the calls of the step under autocast, and the casts in between. The backward pass mirrors the
forward: an operator whose inputs were cast gets the casts' copies back as saved tensors, and its
gradients are cast back.

The operator lists are those of ``torch.amp``; a test holds them against the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from slipstream.graph import Call, Graph, StepPhase, TensorSpec, cast

Category = Literal["lower", "float32", "widest"]

_FULL = "float32"

LOWER: dict[str, frozenset[str]] = {
    "cpu": frozenset(
        [
            "_addmm_activation",
            "_convolution",
            "_native_multi_head_attention",
            "addbmm",
            "addmm",
            "baddbmm",
            "bmm",
            "conv1d",
            "conv2d",
            "conv3d",
            "conv_tbc",
            "conv_transpose1d",
            "conv_transpose2d",
            "conv_transpose3d",
            "linalg_vecdot",
            "linear",
            "matmul",
            "mkldnn_rnn_layer",
            "mm",
            "prelu",
            "scaled_dot_product_attention",
        ]
    ),
    "cuda": frozenset(
        [
            "_convolution",
            "_scaled_dot_product_flash_attention",
            "_thnn_fused_gru_cell",
            "_thnn_fused_lstm_cell",
            "addbmm",
            "addmm",
            "addmv",
            "addr",
            "baddbmm",
            "bmm",
            "chain_matmul",
            "conv1d",
            "conv2d",
            "conv3d",
            "conv_tbc",
            "conv_transpose1d",
            "conv_transpose2d",
            "conv_transpose3d",
            "convolution",
            "cudnn_convolution",
            "cudnn_convolution_transpose",
            "einsum",
            "gru_cell",
            "linalg_multi_dot",
            "linalg_vecdot",
            "linear",
            "lstm_cell",
            "matmul",
            "mm",
            "mv",
            "prelu",
            "rnn_relu_cell",
            "rnn_tanh_cell",
            "scaled_dot_product_attention",
        ]
    ),
}
WIDEST: dict[str, frozenset[str]] = {
    "cpu": frozenset(["cat", "stack", "index_copy"]),
    "cuda": frozenset(
        [
            "addcdiv",
            "addcmul",
            "atan2",
            "bilinear",
            "cat",
            "cross",
            "dot",
            "grid_sampler",
            "index_put",
            "scatter_add",
            "stack",
            "tensordot",
            "vdot",
        ]
    ),
}
FLOAT32: dict[str, frozenset[str]] = {
    "cpu": frozenset(
        [
            "adaptive_avg_pool3d",
            "adaptive_max_pool3d",
            "avg_pool3d",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "cdist",
            "cosine_embedding_loss",
            "cross_entropy_loss",
            "ctc_loss",
            "fractional_max_pool2d",
            "fractional_max_pool3d",
            "grid_sampler",
            "grid_sampler_2d",
            "grid_sampler_3d",
            "hinge_embedding_loss",
            "huber_loss",
            "kl_div",
            "l1_loss",
            "margin_ranking_loss",
            "max_pool3d",
            "max_unpool2d",
            "max_unpool3d",
            "mse_loss",
            "multi_margin_loss",
            "multilabel_margin_loss",
            "nll_loss",
            "nll_loss2d",
            "polar",
            "prod",
            "quantile",
            "reflection_pad1d",
            "reflection_pad2d",
            "replication_pad1d",
            "replication_pad2d",
            "replication_pad3d",
            "smooth_l1_loss",
            "soft_margin_loss",
            "stft",
            "trace",
            "triplet_margin_loss",
        ]
    ),
    "cuda": frozenset(
        [
            "acos",
            "asin",
            "binary_cross_entropy_with_logits",
            "cdist",
            "cosh",
            "cosine_embedding_loss",
            "cosine_similarity",
            "cross_entropy_loss",
            "cumprod",
            "cumsum",
            "dist",
            "erfinv",
            "exp",
            "expm1",
            "group_norm",
            "hinge_embedding_loss",
            "huber_loss",
            "kl_div",
            "l1_loss",
            "layer_norm",
            "log",
            "log10",
            "log1p",
            "log2",
            "log_softmax",
            "logsumexp",
            "margin_ranking_loss",
            "mse_loss",
            "multi_margin_loss",
            "multilabel_margin_loss",
            "native_layer_norm",
            "nll_loss",
            "nll_loss2d",
            "norm",
            "pdist",
            "poisson_nll_loss",
            "pow",
            "prod",
            "reciprocal",
            "renorm",
            "rms_norm",
            "rsqrt",
            "sinh",
            "smooth_l1_loss",
            "soft_margin_loss",
            "softmax",
            "softplus",
            "sum",
            "tan",
            "triplet_margin_loss",
            "upsample_bilinear2d",
            "upsample_nearest2d",
        ]
    ),
}
# Statistics that stay in float32 whatever the input: (operator, index of the output).
_FULL_OUTPUTS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (1,),
    "aten::native_layer_norm": (1, 2),
    "aten::native_group_norm": (1, 2),
    "aten::native_batch_norm": (1, 2),
    "aten::_native_batch_norm_legit": (1, 2),
}


@dataclass
class AutocastPlan:
    """The calls a step would make under autocast.

    Attributes:
        changed: by task: the call in its new dtypes.
        casts: (task, before it or after it, the cast), in program order.
        lowered: how many operators run in the lower precision.
    """

    changed: dict[int, Call] = field(default_factory=dict)
    casts: list[tuple[int, bool, Call]] = field(default_factory=list)
    lowered: int = 0


def plan(graph: Graph, dtype: str, device: str = "cpu") -> AutocastPlan:
    """How `graph` would run with the root module's forward under autocast to `dtype`."""
    return _Interpreter(graph, dtype, device).run()


def category(scope: Sequence[str], device: str) -> Category | None:
    """What autocast does at the outermost operator of `scope` it knows, or None."""
    for name in scope:
        short = name.removeprefix("aten::")
        if short in LOWER[device]:
            return "lower"
        if short in FLOAT32[device]:
            return "float32"
        if short in WIDEST[device]:
            return "widest"
    return None


class _Interpreter:
    def __init__(self, graph: Graph, dtype: str, device: str) -> None:
        self._graph = graph
        self._low = dtype
        self._device = device
        self._plan = AutocastPlan()
        # Storages that would hold the lower precision though float32 was recorded.
        self._lowered: set[int] = set()
        self._parameters = set(graph.parameters.tolist())
        self._cached: set[int] = set()
        # By autograd number: what was cast on the way into the forward operator.
        self._cast_in: dict[int, dict[int, TensorSpec]] = {}
        self._low_nodes: set[int] = set()

    def run(self) -> AutocastPlan:
        tasks = self._graph.tasks
        for t in range(len(tasks)):
            if tasks.call[t] < 0:
                continue
            call = self._graph.calls[tasks.call[t]]
            storages = self._graph.storages(t).tolist()
            inputs, outputs = storages[: len(call.inputs)], storages[len(call.inputs) :]
            phase = tasks.phase[t]
            if phase == StepPhase.BACKWARD:
                self._backward(t, call, inputs, outputs)
            elif phase == StepPhase.FORWARD and self._inside(t):
                self._forward(t, call, inputs, outputs)
            else:
                self._outside(t, call, inputs, outputs)
        return self._plan

    def _inside(self, t: int) -> bool:
        module = self._graph.string(int(self._graph.tasks.module[t]))
        return module == "model" or module.startswith("model.")

    def _forward(self, t: int, call: Call, inputs: list[int], outputs: list[int]) -> None:
        scope = self._graph.string(int(self._graph.tasks.scope[t])).split("/")
        rule = category([*scope, call.name], self._device)
        sequence = int(self._graph.tasks.sequence[t])
        if rule == "lower":
            self._low_nodes.add(sequence)
        if _is_view(inputs, outputs):
            # Costs the same in every dtype; the copy it looks at is made where it is used.
            return
        dtypes = self._dtypes(call, inputs)
        if rule == "lower":
            for spec, storage, dtype in zip(call.inputs, inputs, dtypes, strict=True):
                if dtype != _FULL or spec.dtype != _FULL:
                    continue
                self._cast_in.setdefault(sequence, {})[storage] = spec
                if storage not in self._cached:
                    self._cast(t, spec, self._low, before=True)
                if storage in self._parameters:
                    self._cached.add(storage)
            dtypes = [self._low if dtype == _FULL else dtype for dtype in dtypes]
            self._plan.lowered += 1
        elif rule == "float32" or (rule == "widest" and _FULL in dtypes):
            for spec, dtype in zip(call.inputs, dtypes, strict=True):
                if dtype == self._low and spec.dtype == _FULL:
                    self._cast(t, spec.as_dtype(self._low), _FULL, before=True)
            dtypes = [_FULL if dtype == self._low else dtype for dtype in dtypes]
        self._finish(t, call, dtypes, inputs, outputs)

    def _outside(self, t: int, call: Call, inputs: list[int], outputs: list[int]) -> None:
        """Not under autocast: the model's outputs arrive as float32, each cast once."""
        if _is_view(inputs, outputs):
            return
        for spec, storage in zip(call.inputs, inputs, strict=True):
            if storage in self._lowered and spec.dtype == _FULL:
                self._cast(t, spec.as_dtype(self._low), _FULL, before=True)
                self._lowered.discard(storage)
        self._lowered.difference_update(outputs)

    def _backward(self, t: int, call: Call, inputs: list[int], outputs: list[int]) -> None:
        if _is_view(inputs, outputs):
            return
        sequence = int(self._graph.tasks.sequence[t])
        saved = self._cast_in.get(sequence, {})
        dtypes = [
            self._low if storage in saved and dtype == _FULL else dtype
            for storage, dtype in zip(inputs, self._dtypes(call, inputs), strict=True)
        ]
        if sequence in self._low_nodes:
            keep = _statistics(call)
            for i, (spec, dtype) in enumerate(zip(call.inputs, dtypes, strict=True)):
                if dtype == _FULL and i not in keep:
                    # The gradient comes from a float32 consumer; autograd casts it on the way in.
                    self._cast(t, spec, self._low, before=True)
                    dtypes[i] = self._low
        self._finish(t, call, dtypes, inputs, outputs)
        # Gradients of what was cast on the way in are cast back on the way out.
        sizes = {spec.numel for spec in saved.values()}
        for spec, storage in zip(call.outputs, outputs, strict=False):
            if storage in self._lowered and spec.numel in sizes:
                self._cast(t, spec.as_dtype(self._low), _FULL, before=False)
                self._lowered.discard(storage)

    def _dtypes(self, call: Call, inputs: list[int]) -> list[str]:
        return [
            self._low if storage in self._lowered and spec.dtype == _FULL else spec.dtype
            for spec, storage in zip(call.inputs, inputs, strict=True)
        ]

    def _cast(self, t: int, spec: TensorSpec, dtype: str, *, before: bool) -> None:
        self._plan.casts.append((t, before, cast(spec, dtype)))

    def _finish(
        self, t: int, call: Call, dtypes: list[str], inputs: list[int], outputs: list[int]
    ) -> None:
        """Note the call's new dtypes, and what its fresh outputs would hold."""
        recorded = [spec.dtype for spec in call.inputs]
        if dtypes != recorded:
            self._plan.changed[t] = call.with_dtypes(dtypes)
        low = self._follows(call, dtypes)
        full = _FULL_OUTPUTS.get(call.name, ())
        for i, (spec, storage) in enumerate(zip(call.outputs, outputs, strict=False)):
            if storage in inputs:
                continue  # in place: the storage keeps its dtype
            if low and spec.dtype == _FULL and i not in full:
                self._lowered.add(storage)
            else:
                self._lowered.discard(storage)

    def _follows(self, call: Call, dtypes: list[str]) -> bool:
        """Whether an operator given `dtypes` returns the lower precision."""
        if self._low not in dtypes:
            return False
        if "norm" in call.name:
            return dtypes[0] == self._low
        # Type promotion: tensors with dimensions outrank scalars.
        shaped = [
            dtype for spec, dtype in zip(call.inputs, dtypes, strict=True) if len(spec.shape) > 0
        ]
        return _FULL not in shaped


def _is_view(inputs: list[int], outputs: list[int]) -> bool:
    """Whether the call only looks at a storage: one output, the first input's storage.

    In-place operators do too, but return their own first input and have more of them.
    """
    return len(inputs) == 1 and len(outputs) >= 1 and all(out == inputs[0] for out in outputs)


def _statistics(call: Call) -> set[int]:
    """Inputs of a backward operator that hold float32 statistics of its forward."""
    if call.name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
        # grad_out, query, key, value, out, logsumexp
        return {5}
    return set()
