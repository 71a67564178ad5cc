"""The operator ``slipstream::robe``: bags of rows that are hashed blocks of one shared array.

One call looks up several tables. Kernels hash blocks on the fly in both passes and store no index.
``native/src/robe/hash.h`` defines the position of a number; `robe_reference` implements it in
torch's operators, for other dtypes and devices, and without the compiled library. CUDA devices use
the Triton kernels of `robe_triton` if Triton is installed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.native import InstructionSet, triton_module
from slipstream.native.family import FLOAT, INT32, POINTER, Family, structure, tensor_pointer
from slipstream.native.operators import define
from slipstream.techniques.embedding.kernels import bags as bags_kernels
from slipstream.techniques.embedding.kernels import robe_reference as reference

MODES = ("sum", "mean", "max")
"""Reductions of a bag, by the integer that the operator takes."""

_BAGS = "Tensor ids, Tensor? offsets, Tensor? weights, Tensor tables, SymInt bags, SymInt width"
_HOW = f"{_BAGS}, int block, bool sign, int mode"

table_key = reference.table_key


_Lookup = structure(
    "void* tables; int64_t table_count, bags, width; void* ids; int64_t count; void* offsets;"
    "int64_t offset_count; void* weights; int64_t size, block;"
    "int32_t id_bytes, sign, mode, threads"
)
_FAMILY = Family("robe", {
    "robe_forward": [INT32, POINTER, POINTER, POINTER],
    "robe_backward": [INT32, POINTER, POINTER, FLOAT, POINTER, POINTER, POINTER],
    "robe_weight_gradient": [INT32, POINTER, POINTER, POINTER, POINTER],
})  # fmt: skip


def kernels() -> dict[InstructionSet, int]:
    """Return the kernels that this machine runs, see `Family.kernels`."""
    return _FAMILY.kernels


def _kernel_for(array: torch.Tensor) -> int | None:
    """Return the compiled kernel for `array`, or None."""
    return _FAMILY.kernel() if array.is_cpu and array.dtype is torch.float32 else None


def _on_device(array: torch.Tensor) -> Any:
    """Return the module of Triton kernels for `array`, or None."""
    if not (array.is_cuda and array.dtype is torch.float32):
        return None
    return triton_module("slipstream.techniques.embedding.kernels.robe_triton")


def _described(size: int, how: tuple[Any, ...]) -> Any:
    """Return the library's struct of arguments; the tensors must outlive it."""
    ids, offsets, weights, tables, bags, width, block, sign, mode = how
    return _Lookup(
        tables.data_ptr(), tables.shape[0], bags, width, ids.data_ptr(), ids.numel(),
        tensor_pointer(offsets), 0 if offsets is None else offsets.numel(),
        tensor_pointer(weights), size, block, ids.element_size(), sign,
        mode, torch.get_num_threads(),
    )  # fmt: skip


def _call(function: str, kernel: int, size: int, how: tuple[Any, ...], *arguments: object) -> None:
    """Call a kernel, and raise InvalidArgumentError if it rejects ids or offsets."""
    compiled = getattr(_FAMILY.library, f"slipstream_robe_{function}")
    if status := compiled(kernel, ctypes.byref(_described(size, how)), *arguments):
        ids, offsets, _, tables, bags = how[:5]
        bags_kernels.check(ids, offsets, tables[:, 1], bags)
        raise SlipstreamError(f"the embedding kernel returned status {status}")


def forward_by(kernel: int, array: torch.Tensor, *how: Any) -> torch.Tensor:
    """Look up bags by one of `kernels`; takes checked arguments of ``slipstream::robe``."""
    rows = array.new_empty(how[4], how[5])
    _call("forward", kernel, array.numel(), how, array.data_ptr(), rows.data_ptr())
    return rows


def backward_by(
    kernel: int,
    grad: torch.Tensor,
    array: torch.Tensor,
    pooled: torch.Tensor | None,
    *how: Any,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return the array's gradient by one of `kernels`: [array.numel()]."""
    gradient = torch.zeros_like(array)
    _call(
        "backward", kernel, array.numel(), how, grad.data_ptr(), scale, array.data_ptr(),
        tensor_pointer(pooled), gradient.data_ptr(),
    )  # fmt: skip
    return gradient


def weights_by(kernel: int, grad: torch.Tensor, array: torch.Tensor, *how: Any) -> torch.Tensor:
    """Return the gradient of the weights of ids by one of `kernels`: [ids]."""
    gradient = array.new_empty(how[0].numel())
    pointers = grad.data_ptr(), array.data_ptr(), gradient.data_ptr()
    _call("weight_gradient", kernel, array.numel(), how, *pointers)
    return gradient


def _check(array: torch.Tensor, how: tuple[Any, ...]) -> None:
    ids, offsets, weights, tables, bags, _, block, _, mode = how
    if array.dim() != 1 or not array.is_floating_point() or not array.is_contiguous():
        raise InvalidArgumentError("array", "must be one-dimensional, contiguous floating point")
    if not 1 <= block <= array.numel():
        raise InvalidArgumentError("block", f"{block} is not between 1 and {array.numel()}")
    if tables.dtype is not torch.int64 or tables.dim() != 2 or tables.shape[1] != 4:
        raise InvalidArgumentError("tables", "must be int64 [tables, 4]")
    if not tables.is_cpu or not tables.is_contiguous():
        raise InvalidArgumentError("tables", "must be contiguous, on the CPU")
    bags_kernels.check_form(ids, offsets, weights, array, tables.shape[0] * bags)
    if mode not in range(len(MODES)) or (weights is not None and MODES[mode] != "sum"):
        raise InvalidArgumentError(
            "mode", f"{mode} is not a mode, or has weights, which require mode sum"
        )


def _check_gradient(array: torch.Tensor, grad: torch.Tensor | None, how: Sequence[Any]) -> None:
    shape = (how[4], how[5])
    if grad is None or grad.shape != shape or (grad.dtype, grad.device) != (
        array.dtype, array.device,
    ):  # fmt: skip
        raise InvalidArgumentError(
            "grad", f"and the output must be {array.dtype} {shape} on '{array.device}'"
        )


def _robe(array: torch.Tensor, *how: Any) -> torch.Tensor:
    """Implement ``slipstream::robe``; compiled kernels check ids and offsets."""
    _check(array, how)
    if (kernel := _kernel_for(array)) is not None:
        return forward_by(kernel, array, *how)
    ids, offsets, _, tables, bags = how[:5]
    bags_kernels.check(ids, offsets, tables[:, 1], bags)
    if (triton := _on_device(array)) is not None:
        rows: torch.Tensor = triton.forward(array, *how)
        return rows
    return by_reference(array, *how)


def by_reference(array: torch.Tensor, *how: Any) -> torch.Tensor:
    """Look up bags by torch's operators, differentiably."""
    ids, offsets, weights, tables, bags, _, block, sign, mode = how
    return reference.bags_of(array, ids, offsets, weights, tables, bags, block, sign, MODES[mode])


def _gradient(
    grad: torch.Tensor, array: torch.Tensor, pooled: torch.Tensor | None, *how: Any
) -> torch.Tensor:
    """Implement ``slipstream::robe.gradient``: [array.numel()], times the last argument."""
    *how_, scale = how
    _check(array, tuple(how_))
    _check_gradient(array, grad, how_)
    if not abs(scale) <= torch.finfo(torch.float32).max:
        raise InvalidArgumentError("scale", f"{scale} is not a finite float32")
    if MODES[how_[-1]] == "max":
        _check_gradient(array, pooled, how_)
        assert pooled is not None
        pooled = pooled.contiguous()
    if (kernel := _kernel_for(array)) is not None:
        return backward_by(kernel, grad.contiguous(), array, pooled, *how_, scale=scale)
    gradient: torch.Tensor
    if (triton := _on_device(array)) is not None:
        gradient = triton.backward(grad.contiguous(), array, pooled, *how_, scale=scale)
        return gradient
    (unscaled,) = bags_kernels.gradients(lambda leaf: by_reference(leaf, *how_), [array], grad)
    gradient = unscaled * scale
    return gradient


def _weights(grad: torch.Tensor, array: torch.Tensor, *how: Any) -> torch.Tensor:
    """Implement ``slipstream::robe.weights``: [ids]."""
    _check(array, how)
    _check_gradient(array, grad, how)
    if (kernel := _kernel_for(array)) is not None:
        return weights_by(kernel, grad.contiguous(), array, *how)
    gradient: torch.Tensor
    if (triton := _on_device(array)) is not None:
        gradient = triton.weight_gradient(grad.contiguous(), array, *how)
        return gradient
    (gradient,) = bags_kernels.gradients(
        lambda weights: by_reference(array.detach(), *how[:2], weights, *how[3:]), [how[2]], grad
    )
    return gradient


define(
    f"robe(Tensor array, {_HOW}) -> Tensor",
    _robe,
    lambda array, *how: array.new_empty(how[4], how[5]),
)
define(
    f"robe.gradient(Tensor grad, Tensor array, Tensor? pooled, {_HOW}, float scale) -> Tensor",
    _gradient,
    lambda grad, array, *how: torch.empty_like(array),
)
define(
    f"robe.weights(Tensor grad, Tensor array, {_HOW}) -> Tensor",
    _weights,
    lambda grad, array, *how: array.new_empty(how[0].numel()),
)

robe = torch.ops.slipstream.robe.default
robe_gradient = torch.ops.slipstream.robe.gradient
robe_weights = torch.ops.slipstream.robe.weights
