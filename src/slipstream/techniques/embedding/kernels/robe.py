"""The operator ``slipstream::robe``: bags of rows that are hashed blocks of one shared array.

Several tables are looked up in one call. Blocks are hashed where they are read: no index is
written down, in either direction. Where a number lies is told by ``native/src/robe/hash.h`` and,
in torch's operators, by `robe_reference`, which stands in for other dtypes and devices, and where
the compiled library is missing. A CUDA device has Triton's kernels (`robe_triton`) where Triton is
installed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.native import InstructionSet, triton_module
from slipstream.native.family import FLOAT, INT32, POINTER, Family, tensor_pointer
from slipstream.native.operators import define
from slipstream.techniques.embedding.kernels import bags as bags_door
from slipstream.techniques.embedding.kernels import robe_reference as reference

MODES = ("sum", "mean", "max")
"""How a bag's rows become one, by the numbers the operator takes."""

_BAGS = "Tensor ids, Tensor? offsets, Tensor? weights, Tensor tables, SymInt bags, SymInt width"
_HOW = "int block, bool sign, int mode"
_SCHEMAS = (
    f"robe(Tensor array, {_BAGS}, {_HOW}) -> Tensor",
    f"robe.gradient(Tensor grad, Tensor array, Tensor? made, {_BAGS}, {_HOW}, float scale)"
    " -> Tensor",
    f"robe.weights(Tensor grad, Tensor array, {_BAGS}, {_HOW}) -> Tensor",
)

table_key = reference.table_key


class _Lookup(ctypes.Structure):
    _fields_ = (
        ("tables", ctypes.c_void_p),
        ("table_count", ctypes.c_int64),
        ("bags", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("offset_count", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("id_bytes", ctypes.c_int32),
        ("sign", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


_FAMILY = Family("robe", {
    "robe_forward": [INT32, POINTER, POINTER, POINTER],
    "robe_backward": [INT32, POINTER, POINTER, FLOAT, POINTER, POINTER, POINTER],
    "robe_weight_gradient": [INT32, POINTER, POINTER, POINTER, POINTER],
})  # fmt: skip


def kernels() -> dict[InstructionSet, int]:
    """The kernels that run here, see `Family.kernels`."""
    return _FAMILY.kernels


def _on_device() -> Any:
    """The kernels for CUDA devices, or None."""
    return triton_module("slipstream.techniques.embedding.kernels.robe_triton")


def _kernel_for(array: torch.Tensor) -> int | None:
    """The compiled kernel that does it, or None."""
    return _FAMILY.kernel() if array.is_cpu and array.dtype is torch.float32 else None


def _runs_on_device(array: torch.Tensor) -> bool:
    """Whether a kernel of Triton's does it."""
    return array.is_cuda and array.dtype is torch.float32 and _on_device() is not None


def _described(
    size: int,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    tables: torch.Tensor,
    bags: int,
    width: int,
    block: int,
    sign: bool,
    mode: int,
) -> Any:
    """The arguments as the library takes them; the tensors must outlive it."""
    return _Lookup(
        tables.data_ptr(), tables.shape[0], bags, width, ids.data_ptr(), ids.numel(),
        tensor_pointer(offsets), 0 if offsets is None else offsets.numel(),
        tensor_pointer(weights), size, block, ids.element_size(), sign,
        mode, torch.get_num_threads(),
    )  # fmt: skip


def _done(status: int, how: tuple[Any, ...]) -> None:
    """Raise what is wrong with the arguments, if the kernel refused them."""
    if status:
        ids, offsets, _, tables, bags = how[:5]
        bags_door.check(ids, offsets, tables[:, 1], bags)
        raise SlipstreamError(f"the embedding kernel returned status {status}")


def forward_by(kernel: int, array: torch.Tensor, *how: Any) -> torch.Tensor:
    """The look-up by one of `kernels`; arguments are those of ``slipstream::robe``, checked."""
    bags, width = how[4], how[5]
    rows = array.new_empty(bags, width)
    lookup = _described(array.numel(), *how)
    _done(
        _FAMILY.library.slipstream_robe_forward(
            kernel, ctypes.byref(lookup), array.data_ptr(), rows.data_ptr()
        ),
        how,
    )
    return rows


def backward_by(
    kernel: int,
    grad: torch.Tensor,
    array: torch.Tensor,
    made: torch.Tensor | None,
    *how: Any,
    scale: float = 1.0,
) -> torch.Tensor:
    """The array's gradient by one of `kernels`: [array.numel()]."""
    gradient = torch.zeros_like(array)
    lookup = _described(array.numel(), *how)
    _done(
        _FAMILY.library.slipstream_robe_backward(
            kernel, ctypes.byref(lookup), grad.data_ptr(), scale, array.data_ptr(),
            tensor_pointer(made), gradient.data_ptr(),
        ),
        how,
    )  # fmt: skip
    return gradient


def weights_by(kernel: int, grad: torch.Tensor, array: torch.Tensor, *how: Any) -> torch.Tensor:
    """The gradient of the weights of ids by one of `kernels`: [ids]."""
    gradient = array.new_empty(how[0].numel())
    lookup = _described(array.numel(), *how)
    _done(
        _FAMILY.library.slipstream_robe_weight_gradient(
            kernel, ctypes.byref(lookup), grad.data_ptr(), array.data_ptr(), gradient.data_ptr()
        ),
        how,
    )
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
    bags_door.check_form(ids, offsets, weights, array, tables.shape[0] * bags)
    if mode not in range(len(MODES)) or (weights is not None and MODES[mode] != "sum"):
        raise InvalidArgumentError("mode", f"{mode} is not possible (weights need mode sum)")


def _check_gradient(array: torch.Tensor, grad: torch.Tensor | None, how: Sequence[Any]) -> None:
    shape = (how[4], how[5])
    if grad is None or grad.shape != shape or grad.dtype != array.dtype:
        raise InvalidArgumentError("grad", f"and what was made must be {array.dtype} {shape}")


def _robe(array: torch.Tensor, *how: Any) -> torch.Tensor:
    """``slipstream::robe``; kernels check ids and offsets themselves."""
    _check(array, how)
    if (kernel := _kernel_for(array)) is not None:
        return forward_by(kernel, array, *how)
    ids, offsets, _, tables, bags = how[:5]
    bags_door.check(ids, offsets, tables[:, 1], bags)
    if _runs_on_device(array):
        found: torch.Tensor = _on_device().forward(array, *how)
        return found
    return by_reference(array, *how)


def by_reference(array: torch.Tensor, *how: Any) -> torch.Tensor:
    """The same by torch's operators, and differentiable."""
    ids, offsets, weights, tables, bags, _, block, sign, mode = how
    return reference.bags_of(array, ids, offsets, weights, tables, bags, block, sign, MODES[mode])


def _gradient(
    grad: torch.Tensor, array: torch.Tensor, made: torch.Tensor | None, *how: Any
) -> torch.Tensor:
    """``slipstream::robe.gradient``: dense, [array.numel()], times the scale that comes last."""
    *how_, scale = how
    _check(array, tuple(how_))
    _check_gradient(array, grad, how_)
    if MODES[how_[-1]] == "max":
        _check_gradient(array, made, how_)
    if (kernel := _kernel_for(array)) is not None:
        return backward_by(kernel, grad.contiguous(), array, made, *how_, scale=scale)
    gradient: torch.Tensor
    if _runs_on_device(array):
        gradient = _on_device().backward(grad.contiguous(), array, made, *how_, scale=scale)
        return gradient
    with torch.enable_grad():
        leaf = array.detach().requires_grad_()
        (found,) = torch.autograd.grad(by_reference(leaf, *how_), leaf, grad)
    gradient = found * scale
    return gradient


def _weights(grad: torch.Tensor, array: torch.Tensor, *how: Any) -> torch.Tensor:
    """``slipstream::robe.weights``: [ids]."""
    _check(array, how)
    _check_gradient(array, grad, how)
    if (kernel := _kernel_for(array)) is not None:
        return weights_by(kernel, grad.contiguous(), array, *how)
    if _runs_on_device(array):
        gradient: torch.Tensor = _on_device().weight_gradient(grad.contiguous(), array, *how)
        return gradient
    with torch.enable_grad():
        leaf = how[2].detach().requires_grad_()
        made = by_reference(array.detach(), *how[:2], leaf, *how[3:])
        found: tuple[torch.Tensor, ...] = torch.autograd.grad(made, leaf, grad)
    return found[0]


def _fake(array: torch.Tensor, *how: Any) -> torch.Tensor:
    return array.new_empty(how[4], how[5])


def _fake_gradient(grad: torch.Tensor, array: torch.Tensor, *how: Any) -> torch.Tensor:
    return torch.empty_like(array)


def _fake_weights(grad: torch.Tensor, array: torch.Tensor, *how: Any) -> torch.Tensor:
    return array.new_empty(how[0].numel())


_RUNS: tuple[Any, ...] = (_robe, _gradient, _weights)
_SHAPES: tuple[Any, ...] = (_fake, _fake_gradient, _fake_weights)
for _schema, _run, _shape in zip(_SCHEMAS, _RUNS, _SHAPES, strict=True):
    define(_schema, _run, _shape)

robe = torch.ops.slipstream.robe.default
robe_gradient = torch.ops.slipstream.robe.gradient
robe_weights = torch.ops.slipstream.robe.weights
