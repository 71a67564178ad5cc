"""Bytes that an operator call reads and writes, from its schema, shapes and strides.

Every element is counted once, however often a kernel accesses it. Views move nothing. An expanded
tensor counts its elements in memory.

Source: Ivanov et al., "Data Movement Is All You Need: A Case Study on Optimizing Transformers",
MLSys 2021, section 3.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slipstream.graph.call import ITEM_BYTES, Call, TensorSpec


class OperatorClass(StrEnum):
    """Class of an operator by its data access.

    `CONTRACTION` sums products over a shared dimension; `NORMALIZATION` reduces a dimension and
    may map the result; `ELEMENTWISE` computes elements independently; `INDEXING` reads or writes at
    positions given by other data; `VIEW` moves nothing.
    """

    CONTRACTION = "contraction"
    NORMALIZATION = "normalization"
    ELEMENTWISE = "element-wise"
    INDEXING = "indexing"
    VIEW = "view"


@dataclass(frozen=True)
class Traffic:
    """Bytes of a call per tensor.

    Attributes:
        reads: per tensor of ``Call.inputs``; 0 if only its shape is used, or it is only written.
        writes: per tensor of ``Call.outputs``; 0 for views.
        extra: bytes written to inputs that are not among the outputs.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    extra: int = 0

    @property
    def total(self) -> int:
        """Bytes read and written."""
        return sum(self.reads) + sum(self.writes) + self.extra


_CONTRACTIONS = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "matmul", "einsum",
    "linear", "convolution", "_convolution", "convolution_backward", "mkldnn_convolution",
    "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_int_mm", "addr", "ger", "outer",
)  # fmt: skip
_NORMALIZATIONS = frozenset({
    "sum", "mean", "var", "var_mean", "std", "std_mean", "amax", "amin", "max", "min", "argmax",
    "argmin", "logsumexp", "prod", "norm", "linalg_vector_norm", "cumsum", "any", "all",
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
    "native_layer_norm", "native_layer_norm_backward", "native_batch_norm",
    "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward",
    "_fused_rms_norm", "_fused_rms_norm_backward", "mse_loss", "nll_loss_forward", "_foreach_norm",
    "_batch_norm_with_update", "batch_norm_backward", "cudnn_batch_norm", "nll_loss_backward",
})  # fmt: skip
_INDEXED = frozenset({
    "embedding", "embedding_dense_backward", "index", "index_select", "gather", "scatter",
    "scatter_add", "index_put", "index_add", "_embedding_bag", "_embedding_bag_dense_backward",
    "sort", "topk", "nonzero", "masked_select", "unique_dim", "_unique2", "index_copy", "roll",
})  # fmt: skip
_VIEWS = frozenset({
    "_unsafe_view", "_reshape_alias", "detach", "lift_fresh", "alias", "_local_scalar_dense",
    "item",
})  # fmt: skip
# Operators that write a tensor without reading it.
_OVERWRITE = frozenset({
    "copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_",
    "log_normal_", "geometric_", "cauchy_", "set_", "_foreach_copy_", "_foreach_zero_",
})  # fmt: skip
# Operators that only use the shape of their input.
_SHAPE_ONLY = frozenset({
    "empty_like", "ones_like", "zeros_like", "full_like", "rand_like", "randn_like", "new_zeros",
    "new_ones", "new_full", "new_empty", "new_empty_strided", "randint_like",
})  # fmt: skip
_UNWRITTEN = frozenset({"empty_like", "empty", "new_empty", "new_empty_strided", "empty_strided"})
# Indices of inputs of which only the shape is used.
_SHAPE_OF = {
    "nll_loss_backward": (1,), "nll_loss2d_backward": (1,), "native_layer_norm_backward": (5,),
    "max_pool2d_with_indices_backward": (1,), "avg_pool2d_backward": (1,),
}  # fmt: skip
# Operators that read as many bytes of their first tensor as they return.
_CHOSEN = frozenset({"embedding", "index_select", "gather", "index", "take"})


@functools.lru_cache(maxsize=4096)
def _schema(op: str) -> tuple[tuple[str, bool], ...]:
    """Return (name, whether it is written) of each argument of a schema."""
    inside = op.partition("(")[2].rpartition("->")[0].rpartition(")")[0]
    arguments = []
    # Split at commas outside of brackets.
    for part in map(str.strip, re.split(r",(?![^(\[]*[)\]])", inside)):
        if part and part != "*":
            kind, _, name = part.rpartition(" ") if "=" not in part else _typed(part)
            arguments.append((name.partition("=")[0], "!" in kind))
    return tuple(arguments)


def _typed(part: str) -> tuple[str, str, str]:
    return part.partition("=")[0].rpartition(" ")


def short_name(call: Call) -> str:
    """Return the name without namespace, overload and in-place mark: ``add`` of ``aten::add_``."""
    return _short(call.name)


@functools.lru_cache(maxsize=4096)
def _short(full: str) -> str:
    name = full.partition("::")[2] or full
    return name if name.startswith("__") else name.removesuffix("_") or name


def is_view(call: Call) -> bool:
    """Whether the call returns a view of its input."""
    if short_name(call) in _VIEWS:
        return True
    returned = call.op.rpartition("->")[2]
    return "(a)" in returned and "!" not in returned


def operator_class(call: Call) -> OperatorClass:
    """Return the class of an operator, by its name or else by its shapes."""
    name = short_name(call)
    if is_view(call):
        return OperatorClass.VIEW
    if name in _CONTRACTIONS or "scaled_dot_product" in name or "rnn" in name:
        return OperatorClass.CONTRACTION
    if name in _INDEXED:
        return OperatorClass.INDEXING
    reduces = bool(call.outputs) and max(spec.numel for spec in call.outputs) < max(
        (spec.numel for spec in call.inputs), default=0
    )
    if name in _NORMALIZATIONS or (reduces and "_foreach" not in name):
        return OperatorClass.NORMALIZATION
    return OperatorClass.ELEMENTWISE


def stored_elements(spec: TensorSpec) -> int:
    """Return the number of elements in memory; an expanded dimension has one."""
    if 0 in spec.shape:
        return 0
    distinct, span = 1, 1
    for extent, stride in zip(spec.shape, spec.strides, strict=True):
        distinct *= extent if stride else 1
        span += (extent - 1) * abs(stride)
    return min(distinct, span)


def stored_bytes(spec: TensorSpec) -> int:
    """Return the bytes of `stored_elements`."""
    return stored_elements(spec) * ITEM_BYTES.get(spec.dtype, 4)


def _flat(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)


@functools.lru_cache(maxsize=1 << 14)
def traffic(call: Call) -> Traffic:
    """Return the bytes that `call` reads and writes, counting each element once."""
    name = short_name(call)
    if is_view(call):
        scalar = name in ("_local_scalar_dense", "item")
        viewed = tuple(stored_bytes(spec) if scalar else 0 for spec in call.inputs)
        return Traffic(viewed, tuple(0 for _ in call.outputs))
    reads, written = _inputs(call, name)
    writes: Sequence[int] = [
        0 if name in _UNWRITTEN else stored_bytes(spec) for spec in call.outputs
    ]
    if name in _CHOSEN and reads:
        reads[0] = min(reads[0], sum(writes))
    if name == "nll_loss_forward":
        # Only the target's element of each row.
        reads[0] = min(reads[0], call.inputs[1].numel * ITEM_BYTES.get(call.inputs[0].dtype, 4))
    # In-place operators return the written argument.
    returned = call.op.rpartition("->")[2].count("!")
    extra = sum(written[returned:])
    if name == "native_batch_norm" and len(call.inputs) >= 5 and call.arguments[5] is True:
        extra += sum(stored_bytes(spec) for spec in call.inputs[3:5])
    return Traffic(tuple(reads), tuple(writes), extra)


def _inputs(call: Call, name: str) -> tuple[list[int], list[int]]:
    """Return the bytes read per input tensor, and the bytes per written input."""
    names = _schema(call.op)
    overwritten = call.name.partition("::")[2] in _OVERWRITE
    reads: list[int] = []
    written: list[int] = []
    for number, argument in enumerate(call.arguments):
        label, changed = names[number] if number < len(names) else ("", False)
        for spec in _flat(argument):
            nbytes = stored_bytes(spec)
            written += [nbytes] if changed else []
            overwrites = changed and (overwritten or label == "out")
            unread = overwrites or name in _SHAPE_ONLY or len(reads) in _SHAPE_OF.get(name, ())
            reads.append(0 if unread else nbytes)
    return reads, written


_PER_ELEMENT = {
    "_softmax": 5, "_log_softmax": 5, "_softmax_backward_data": 4, "_log_softmax_backward_data": 4,
    "native_layer_norm": 7, "native_layer_norm_backward": 12, "native_batch_norm": 7,
    "native_batch_norm_backward": 10, "native_group_norm": 7, "native_group_norm_backward": 10,
    "var": 4, "var_mean": 4, "mse_loss": 3,
}  # fmt: skip
_NO_ARITHMETIC = frozenset({
    "copy", "clone", "cat", "stack", "fill", "zero", "ones_like", "zeros_like", "full_like", "full",
    "zeros", "ones", "_to_copy", "new_zeros", "new_ones", "new_full", "constant_pad_nd", "arange",
    "slice_backward", "select_backward", "repeat", "flip", "as_strided_copy", "scalar_tensor",
}) | _UNWRITTEN  # fmt: skip


def map_operations(call: Call) -> int:
    """Return the operations of a call without contraction, from its shapes.

    An element-wise call has one per returned element, a reduction one per element read, a
    normalization as many as its definition; copies have none.
    """
    name = short_name(call)
    kind = operator_class(call)
    if kind in (OperatorClass.VIEW, OperatorClass.CONTRACTION, OperatorClass.INDEXING):
        return 0
    if name in _NO_ARITHMETIC:
        return 0
    returned = max((spec.numel for spec in call.outputs), default=0)
    read = max((spec.numel for spec in call.inputs), default=0)
    if kind is OperatorClass.NORMALIZATION:
        return _PER_ELEMENT.get(name, 1) * max(read, returned)
    if not call.outputs:
        return sum(spec.numel for spec in _flat(call.arguments[0])) if call.arguments else 0
    return sum(spec.numel for spec in call.outputs) if "foreach" in name else returned
