"""The operator ``slipstream::tt``: bags of rows of a tensor train, and of cached rows.

Ids are grouped by the slice of the middle core, with one matmul per slice whatever the bags are,
and only a micro-batch of rows is materialized. `tt_reference` implements other dtypes, devices and
four cores, and replaces a missing compiled library; CUDA devices use the Triton kernels of
`tt_triton` if Triton is installed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.native import InstructionSet, triton_module
from slipstream.native.family import INT32, INT64, POINTER, Family, structure, tensor_pointer
from slipstream.native.operators import define
from slipstream.techniques.embedding.kernels import bags as bags_kernels
from slipstream.techniques.embedding.kernels import tt_reference as reference

MODES = ("sum", "mean")
"""Reductions of a bag, by the integer that the operator takes."""

_BAGS = "Tensor ids, Tensor? offsets, Tensor? weights, int rows, int padding, SymInt bags, int mode"
_HOW = f"Tensor[] cores, Tensor? cache, Tensor? hot, {_BAGS}"
_MAX_KERNEL_CORES = 3
_NO_MEMORY = 3

_Lookup = structure(
    "void* cores[3]; int64_t rows[3], columns[3], ranks[2], num_embeddings, padding; void* cache;"
    "int64_t cache_rows; void* hot; int64_t hot_capacity, bags; void* ids; int64_t count;"
    "void* offsets; int64_t offset_count; void* weights; int32_t id_bytes, mode, threads"
)
_FAMILY = Family("tt", {
    "tt_forward": [INT32, POINTER, POINTER],
    "tt_backward": [INT32, *[POINTER] * 6],
    "tt_weight_gradient": [INT32, *[POINTER] * 3],
    "tt_count": [POINTER, INT64, INT64, POINTER, INT64, POINTER, POINTER],
}, {"tt_count": INT64})  # fmt: skip


def kernels() -> dict[InstructionSet, int]:
    """Return the kernels that this machine runs, see `Family.kernels`."""
    return _FAMILY.kernels


def _kernel_for(cores: Sequence[torch.Tensor]) -> int | None:
    """Return the compiled kernel for `cores`, or None."""
    first = cores[0]
    few = len(cores) <= _MAX_KERNEL_CORES
    runs = few and first.is_cpu and first.dtype is torch.float32
    return _FAMILY.kernel() if runs else None


def _described(cores: list[torch.Tensor], how: tuple[Any, ...]) -> Any:
    """Return the library's struct of arguments; the tensors must outlive it."""
    cache, hot, ids, offsets, weights, rows, padding, bags, mode = how
    return _Lookup(
        (POINTER * 3)(*(core.data_ptr() for core in cores)),
        (INT64 * 3)(*(core.shape[0] for core in cores)),
        (INT64 * 3)(*(core.shape[2] for core in cores)),
        (INT64 * 2)(*(core.shape[1] for core in cores[1:])), rows, padding,
        tensor_pointer(cache), 0 if cache is None else cache.shape[0],
        tensor_pointer(hot), 0 if hot is None else hot.shape[0], bags, ids.data_ptr(), ids.numel(),
        tensor_pointer(offsets), 0 if offsets is None else offsets.numel(), tensor_pointer(weights),
        ids.element_size(), mode, torch.get_num_threads(),
    )  # fmt: skip


def _call(
    function: str, kernel: int, cores: list[torch.Tensor], how: tuple[Any, ...], *arguments: object
) -> None:
    """Call a kernel, and raise InvalidArgumentError if it rejects ids or offsets."""
    compiled = getattr(_FAMILY.library, f"slipstream_tt_{function}")
    status = compiled(kernel, ctypes.byref(_described(cores, how)), *arguments)
    if status == _NO_MEMORY:
        raise SlipstreamError("too little memory for a micro-batch of rows")
    if status:
        _check_ids(how)
        raise SlipstreamError(f"the embedding kernel returned status {status}")


def check_ids(ids: torch.Tensor, offsets: torch.Tensor | None, rows: int, bags: int) -> None:
    """Raise InvalidArgumentError unless ids are below `rows` and offsets ascend from 0."""
    bags_kernels.check(ids, offsets, torch.tensor([rows]), bags)


def _check_ids(how: tuple[Any, ...]) -> None:
    ids, offsets, _, rows, _, bags = how[2:8]
    check_ids(ids, offsets, rows, bags)


def count_hits(hot: torch.Tensor, ids: torch.Tensor, hits: torch.Tensor) -> torch.Tensor:
    """Count look-ups of cached rows, and return the ids of the others in their order.

    Args:
        hot: hash table of hot rows on any device, int64 [capacity, 2].
        ids: int64 [count] on the CPU, overwritten by the result.
        hits: int64 [rows of the cache] on the CPU, incremented per look-up of a row.
    """
    compiled = _FAMILY.library
    if compiled is None or not hot.is_cpu:
        slots = reference.slots_of(hot.cpu(), ids)
        cached = slots >= 0
        hits += torch.bincount(slots[cached], minlength=len(hits))
        return ids[~cached]
    missed = compiled.slipstream_tt_count(
        hot.data_ptr(), len(hot), len(hits), ids.data_ptr(), len(ids), hits.data_ptr(),
        ids.data_ptr(),
    )  # fmt: skip
    if missed < 0:
        raise SlipstreamError("the hash table of hot rows refers to a row that is not in the cache")
    return ids[:missed]


def _width(cores: Sequence[torch.Tensor]) -> int:
    return math.prod(core.shape[2] for core in cores)


def forward_by(kernel: int, cores: Sequence[torch.Tensor], *how: Any) -> torch.Tensor:
    """Look up bags by one of `kernels`; takes checked arguments of ``slipstream::tt``."""
    rows = cores[0].new_empty(how[7], _width(cores))
    _call("forward", kernel, reference.of_three(cores), how, rows.data_ptr())
    return rows


def backward_by(
    kernel: int, grad: torch.Tensor, cores: Sequence[torch.Tensor], *how: Any
) -> list[torch.Tensor]:
    """Return the gradients of the cores, and of the cache if present, by one of `kernels`."""
    three = reference.of_three(cores)
    gradients = [torch.zeros_like(core) for core in three]
    cache = None if how[0] is None else torch.zeros_like(how[0])
    pointers = [
        grad.data_ptr(),
        *(gradient.data_ptr() for gradient in gradients),
        tensor_pointer(cache),
    ]
    _call("backward", kernel, three, how, *pointers)
    return gradients[-len(cores) :] + ([] if cache is None else [cache])


def weights_by(
    kernel: int, grad: torch.Tensor, cores: Sequence[torch.Tensor], *how: Any
) -> torch.Tensor:
    """Return the gradient of the weights of ids by one of `kernels`: [ids]."""
    gradient, three = cores[0].new_empty(how[2].numel()), reference.of_three(cores)
    _call("weight_gradient", kernel, three, how, grad.data_ptr(), gradient.data_ptr())
    return gradient


def _check(cores: Sequence[torch.Tensor], how: tuple[Any, ...]) -> None:
    cache, hot, ids, offsets, weights, _, _, bags, mode = how
    _check_cores(cores)
    first = cores[0]
    if cache is not None:
        _check_cache(cache, hot, first, _width(cores))
    bags_kernels.check_form(ids, offsets, weights, first, bags)
    if mode not in range(len(MODES)) or (weights is not None and MODES[mode] != "sum"):
        raise InvalidArgumentError(
            "mode", f"{mode} is not a mode, or has weights, which require mode sum"
        )


def _check_cores(cores: Sequence[torch.Tensor]) -> None:
    if not 2 <= len(cores) <= 4:
        raise InvalidArgumentError("cores", f"there are {len(cores)}, not 2 to 4")
    for core in cores:
        if core.dim() != 4 or not core.is_contiguous() or not core.is_floating_point():
            raise InvalidArgumentError("cores", "must be contiguous floating point [p, R, q, R']")
        if core.dtype != cores[0].dtype or core.device != cores[0].device or not core.numel():
            raise InvalidArgumentError("cores", "must have one dtype and device, and be not empty")
    ranks = [1, *(core.shape[3] for core in cores)]
    if ranks[:-1] != [core.shape[1] for core in cores] or ranks[-1] != 1:
        raise InvalidArgumentError(
            "cores", f"ranks of adjacent cores differ: {[list(c.shape) for c in cores]}"
        )


def _check_cache(
    cache: torch.Tensor, hot: torch.Tensor | None, like: torch.Tensor, width: int
) -> None:
    if cache.dtype != like.dtype or cache.dim() != 2 or cache.shape[1] != width:
        raise InvalidArgumentError("cache", f"must be {like.dtype} [rows, {width}]")
    if not cache.is_contiguous() or cache.device != like.device:
        raise InvalidArgumentError("cache", "must be contiguous, on the device of the cores")
    if hot is None or hot.dtype is not torch.int64 or hot.dim() != 2 or not hot.is_contiguous():
        raise InvalidArgumentError("hot", "must be contiguous int64 [capacity, 2]")
    capacity = hot.shape[0]
    if hot.shape[1] != 2 or capacity < 1 or capacity & (capacity - 1) or hot.device != like.device:
        raise InvalidArgumentError("hot", f"{list(hot.shape)} is not [a power of two, 2]")


def _check_gradient(cores: Sequence[torch.Tensor], grad: torch.Tensor, how: Sequence[Any]) -> None:
    shape = (how[7], _width(cores))
    first = cores[0]
    if grad.shape != shape or grad.dtype != first.dtype or grad.device != first.device:
        raise InvalidArgumentError("grad", f"must be {first.dtype} {shape} on '{first.device}'")


def _tt(cores: Sequence[torch.Tensor], *how: Any) -> torch.Tensor:
    """Implement ``slipstream::tt``; compiled kernels check ids and offsets."""
    _check(cores, how)
    if (kernel := _kernel_for(cores)) is not None:
        return forward_by(kernel, cores, *how)
    return _in_steps(cores, how)


def in_steps(cores: Sequence[torch.Tensor], *how: Any) -> torch.Tensor:
    """Look up bags in steps that torch differentiates.

    Raises:
        InvalidArgumentError: an argument of ``slipstream::tt`` is invalid; the error names it.
    """
    _check(cores, how)
    return _in_steps(cores, how)


def _in_steps(cores: Sequence[torch.Tensor], how: tuple[Any, ...]) -> torch.Tensor:
    cache, _, ids, offsets, weights, rows, padding, bags, mode = how
    plain = cache is None and weights is None and MODES[mode] == "sum" and ids.numel() and bags
    triton = on_device(cores) if plain else None
    if triton is not None:
        pooled: torch.Tensor | None = triton.sums_of(cores, ids, offsets, bags, padding, rows)
        if pooled is not None:
            return pooled
    _check_ids(how)
    return by_reference(cores, *how)


def on_device(cores: Sequence[torch.Tensor]) -> Any:
    """Return the module of Triton kernels if it supports `cores`, or None."""
    if not cores[0].is_cuda:
        return None
    triton = triton_module("slipstream.techniques.embedding.kernels.tt_triton")
    return triton if triton is not None and triton.runs(cores) else None


def by_reference(cores: Sequence[torch.Tensor], *how: Any) -> torch.Tensor:
    """Look up bags by torch's operators, differentiably."""
    cache, hot, ids, offsets, weights, _, padding, bags, mode = how
    triton = on_device(cores)
    rows_of = reference.rows_of if triton is None else triton.rows_of
    return reference.bags_of(
        cores, cache, hot, ids, offsets, weights, padding, bags, MODES[mode],
        rows_of,
    )  # fmt: skip


def _gradient(grad: torch.Tensor, cores: Sequence[torch.Tensor], *how: Any) -> list[torch.Tensor]:
    """Implement ``slipstream::tt.gradient``: of the cores, and of the cache if present."""
    _check(cores, how)
    _check_gradient(cores, grad, how)
    if (kernel := _kernel_for(cores)) is not None:
        return backward_by(kernel, grad.contiguous(), cores, *how)
    parameters = [*cores, *([] if how[0] is None else [how[0]])]

    def made_by(*leaves: torch.Tensor) -> torch.Tensor:
        cache = None if how[0] is None else leaves[-1]
        return by_reference(leaves[: len(cores)], cache, *how[1:])

    return bags_kernels.gradients(made_by, parameters, grad)


def _weights(grad: torch.Tensor, cores: Sequence[torch.Tensor], *how: Any) -> torch.Tensor:
    """Implement ``slipstream::tt.weights``: [ids]."""
    _check(cores, how)
    _check_gradient(cores, grad, how)
    if (kernel := _kernel_for(cores)) is not None:
        return weights_by(kernel, grad.contiguous(), cores, *how)
    plain = [core.detach() for core in cores]
    (gradient,) = bags_kernels.gradients(
        lambda weights: by_reference(plain, *how[:4], weights, *how[5:]), [how[4]], grad
    )
    return gradient


define(f"tt({_HOW}) -> Tensor", _tt, lambda cores, *how: cores[0].new_empty(how[7], _width(cores)))
define(
    f"tt.gradient(Tensor grad, {_HOW}) -> Tensor[]",
    _gradient,
    lambda grad, cores, cache, *how: [
        torch.empty_like(leaf) for leaf in (*cores, *([] if cache is None else [cache]))
    ],
)
define(
    f"tt.weights(Tensor grad, {_HOW}) -> Tensor",
    _weights,
    lambda grad, cores, *how: cores[0].new_empty(how[2].numel()),
)


def look_up(cores: Sequence[torch.Tensor], *how: Any) -> torch.Tensor:
    """Call ``slipstream::tt``, without a gradient: [bags, q_1 ... q_d]."""
    rows: torch.Tensor = torch.ops.slipstream.tt.default(list(cores), *how)
    return rows
