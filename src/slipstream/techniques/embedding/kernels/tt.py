"""The operator ``slipstream::tt``: bags of rows of a tensor train, and of cached rows.

Ids are grouped by the middle core's slice: one real matrix product for each slice, whatever the
bags are, and only a micro-batch of rows is ever written down. `tt_reference` stands in for other
dtypes, devices and four cores, and where the compiled library is missing; on a CUDA device rows are
made by Triton's kernels (`tt_triton`) where it is there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.native import InstructionSet, triton_module
from slipstream.native.family import INT32, INT64, POINTER, Family, tensor_pointer
from slipstream.native.operators import define
from slipstream.techniques.embedding.kernels import bags as bags_door
from slipstream.techniques.embedding.kernels import tt_reference as reference

MODES = ("sum", "mean")
"""How a bag's rows become one, by the numbers the operator takes."""

_WHERE = "Tensor[] cores, Tensor? cache, Tensor? hot"
_BAGS = "Tensor ids, Tensor? offsets, Tensor? weights, int rows, int padding, SymInt bags, int mode"
_SCHEMAS = (
    f"tt({_WHERE}, {_BAGS}) -> Tensor",
    f"tt.gradient(Tensor grad, {_WHERE}, {_BAGS}) -> Tensor[]",
    f"tt.weights(Tensor grad, {_WHERE}, {_BAGS}) -> Tensor",
)
_MOST_CORES_OF_KERNELS = 3
_NO_MEMORY = 3


class _Lookup(ctypes.Structure):
    _fields_ = (
        ("cores", ctypes.c_void_p * 3),
        ("rows", ctypes.c_int64 * 3),
        ("columns", ctypes.c_int64 * 3),
        ("ranks", ctypes.c_int64 * 2),
        ("num_embeddings", ctypes.c_int64),
        ("padding", ctypes.c_int64),
        ("cache", ctypes.c_void_p),
        ("cache_rows", ctypes.c_int64),
        ("hot", ctypes.c_void_p),
        ("hot_capacity", ctypes.c_int64),
        ("bags", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("offset_count", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("id_bytes", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


_FAMILY = Family("tt", {
    "tt_forward": [INT32, POINTER, POINTER],
    "tt_backward": [INT32, *[POINTER] * 6],
    "tt_weight_gradient": [INT32, *[POINTER] * 3],
    "tt_count": [POINTER, INT64, INT64, POINTER, INT64, POINTER, POINTER],
}, {"tt_count": INT64})  # fmt: skip


def kernels() -> dict[InstructionSet, int]:
    """The kernels that run here, see `Family.kernels`."""
    return _FAMILY.kernels


def _on_device() -> Any:
    """The kernels for CUDA devices, or None."""
    return triton_module("slipstream.techniques.embedding.kernels.tt_triton")


def _kernel_for(cores: Sequence[torch.Tensor]) -> int | None:
    """The compiled kernel that does it, or None."""
    first = cores[0]
    few = len(cores) <= _MOST_CORES_OF_KERNELS
    runs = few and first.is_cpu and first.dtype is torch.float32
    return _FAMILY.kernel() if runs else None


def _of_three(cores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As the kernels take them: two cores are three, of which the first is the number one."""
    if len(cores) == _MOST_CORES_OF_KERNELS:
        return list(cores)
    return [cores[0].new_ones(1, 1, 1, 1), *cores]


def _described(
    cores: list[torch.Tensor],
    cache: torch.Tensor | None,
    hot: torch.Tensor | None,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    rows: int,
    padding: int,
    bags: int,
    mode: int,
) -> Any:
    """The arguments as the library takes them; the tensors must outlive it."""
    three = ctypes.c_int64 * 3
    return _Lookup(
        (ctypes.c_void_p * 3)(*(core.data_ptr() for core in cores)),
        three(*(core.shape[0] for core in cores)), three(*(core.shape[2] for core in cores)),
        (ctypes.c_int64 * 2)(*(core.shape[1] for core in cores[1:])), rows, padding,
        tensor_pointer(cache), 0 if cache is None else cache.shape[0],
        tensor_pointer(hot), 0 if hot is None else hot.shape[0], bags, ids.data_ptr(), ids.numel(),
        tensor_pointer(offsets), 0 if offsets is None else offsets.numel(), tensor_pointer(weights),
        ids.element_size(), mode, torch.get_num_threads(),
    )  # fmt: skip


def _done(status: int, how: tuple[Any, ...]) -> None:
    """Raise what is wrong with the arguments, if the kernel refused them."""
    if status == _NO_MEMORY:
        raise SlipstreamError("too little memory for a micro-batch of rows")
    if status:
        _check_ids(how)
        raise SlipstreamError(f"the embedding kernel returned status {status}")


def check_ids(ids: torch.Tensor, offsets: torch.Tensor | None, rows: int, bags: int) -> None:
    """See that every id is one of `rows` and that offsets rise from 0.

    Raises:
        InvalidArgumentError: ``input`` or ``offsets``, which and where.
    """
    bags_door.check(ids, offsets, torch.tensor([rows]), bags)


def _check_ids(how: tuple[Any, ...]) -> None:
    ids, offsets, _, rows, _, bags = how[2:8]
    check_ids(ids, offsets, rows, bags)


def count_hits(hot: torch.Tensor, ids: torch.Tensor, hits: torch.Tensor) -> torch.Tensor:
    """Count look-ups of cached rows, and return the ids of the others in their order.

    Args:
        hot: table of hot rows on any device, int64 [capacity, 2].
        ids: int64 [count] on the CPU, which become the result: whoever gives them needs them not.
        hits: int64 [rows of the cache] on the CPU: one more for each look-up of a row.
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
        raise SlipstreamError("the table of hot rows names a row that the cache lacks")
    return ids[:missed]


def _width(cores: Sequence[torch.Tensor]) -> int:
    width = 1
    for core in cores:
        width *= core.shape[2]
    return width


def forward_by(kernel: int, cores: Sequence[torch.Tensor], *how: Any) -> torch.Tensor:
    """The look-up by one of `kernels`; arguments are those of ``slipstream::tt``, checked."""
    rows = cores[0].new_empty(how[7], _width(cores))
    three = _of_three(cores)
    lookup = _described(three, *how)
    _done(_FAMILY.library.slipstream_tt_forward(kernel, ctypes.byref(lookup), rows.data_ptr()), how)
    return rows


def backward_by(
    kernel: int, grad: torch.Tensor, cores: Sequence[torch.Tensor], *how: Any
) -> list[torch.Tensor]:
    """The gradients of the cores, and of the cache where there is one, by one of `kernels`."""
    three = _of_three(cores)
    gradients = [torch.zeros_like(core) for core in three]
    cache = None if how[0] is None else torch.zeros_like(how[0])
    lookup = _described(three, *how)
    _done(
        _FAMILY.library.slipstream_tt_backward(
            kernel, ctypes.byref(lookup), grad.data_ptr(), *(one.data_ptr() for one in gradients),
            tensor_pointer(cache),
        ),
        how,
    )  # fmt: skip
    return gradients[-len(cores) :] + ([] if cache is None else [cache])


def weights_by(
    kernel: int, grad: torch.Tensor, cores: Sequence[torch.Tensor], *how: Any
) -> torch.Tensor:
    """The gradient of the weights of ids by one of `kernels`: [ids]."""
    gradient = cores[0].new_empty(how[2].numel())
    three = _of_three(cores)
    lookup = _described(three, *how)
    _done(
        _FAMILY.library.slipstream_tt_weight_gradient(
            kernel, ctypes.byref(lookup), grad.data_ptr(), gradient.data_ptr()
        ),
        how,
    )
    return gradient


def _check(cores: Sequence[torch.Tensor], how: tuple[Any, ...]) -> None:
    cache, hot, ids, offsets, weights, _, _, bags, mode = how
    _check_cores(cores)
    first = cores[0]
    if cache is not None:
        _check_cache(cache, hot, first, _width(cores))
    bags_door.check_form(ids, offsets, weights, first, bags)
    if mode not in range(len(MODES)) or (weights is not None and MODES[mode] != "sum"):
        raise InvalidArgumentError("mode", f"{mode} is not possible (weights need mode sum)")


def _check_cores(cores: Sequence[torch.Tensor]) -> None:
    if not 2 <= len(cores) <= 4:
        raise InvalidArgumentError("cores", f"there are {len(cores)}, not 2 to 4")
    for core in cores:
        if core.dim() != 4 or not core.is_contiguous() or not core.is_floating_point():
            raise InvalidArgumentError("cores", "must be contiguous floating point [p, R, q, R']")
        if core.dtype != cores[0].dtype or core.device != cores[0].device or not core.numel():
            raise InvalidArgumentError("cores", "must be of one dtype and device, and not empty")
    ranks = [1, *(core.shape[3] for core in cores)]
    if ranks[:-1] != [core.shape[1] for core in cores] or ranks[-1] != 1:
        raise InvalidArgumentError("cores", f"ranks do not join: {[list(c.shape) for c in cores]}")


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
    if grad.shape != shape or grad.dtype != cores[0].dtype:
        raise InvalidArgumentError("grad", f"must be {cores[0].dtype} {shape}")


def check(cores: Sequence[torch.Tensor], *how: Any) -> None:
    """See that arguments of ``slipstream::tt`` are what they must be, ids and offsets too.

    Raises:
        InvalidArgumentError: names the argument and what is wrong with it.
    """
    _check(cores, how)
    _check_ids(how)


def _tt(cores: Sequence[torch.Tensor], *how: Any) -> torch.Tensor:
    """``slipstream::tt``; kernels check ids and offsets themselves."""
    _check(cores, how)
    if (kernel := _kernel_for(cores)) is not None:
        return forward_by(kernel, cores, *how)
    _check_ids(how)
    return by_reference(cores, *how)


def by_reference(cores: Sequence[torch.Tensor], *how: Any) -> torch.Tensor:
    """The same by torch's operators, and differentiable."""
    cache, hot, ids, offsets, weights, _, padding, bags, mode = how
    on_device = cores[0].is_cuda and _on_device() is not None and _on_device().runs(cores)
    return reference.bags_of(
        cores, cache, hot, ids, offsets, weights, padding, bags, MODES[mode],
        _on_device().rows_of if on_device else reference.rows_of,
    )  # fmt: skip


def _gradient(grad: torch.Tensor, cores: Sequence[torch.Tensor], *how: Any) -> list[torch.Tensor]:
    """``slipstream::tt.gradient``: of the cores, and of the cache where there is one."""
    _check(cores, how)
    _check_gradient(cores, grad, how)
    if (kernel := _kernel_for(cores)) is not None:
        return backward_by(kernel, grad.contiguous(), cores, *how)
    with torch.enable_grad():
        leaves = [core.detach().requires_grad_() for core in cores]
        cache = None if how[0] is None else how[0].detach().requires_grad_()
        made = by_reference(leaves, cache, *how[1:])
        inputs = leaves if cache is None else [*leaves, cache]
        found = torch.autograd.grad(made, inputs, grad, allow_unused=True)
    return [
        torch.zeros_like(leaf) if one is None else one.contiguous()
        for leaf, one in zip(inputs, found, strict=True)
    ]


def _weights(grad: torch.Tensor, cores: Sequence[torch.Tensor], *how: Any) -> torch.Tensor:
    """``slipstream::tt.weights``: [ids]."""
    _check(cores, how)
    _check_gradient(cores, grad, how)
    if (kernel := _kernel_for(cores)) is not None:
        return weights_by(kernel, grad.contiguous(), cores, *how)
    with torch.enable_grad():
        leaf = how[4].detach().requires_grad_()
        made = by_reference([c.detach() for c in cores], *how[:4], leaf, *how[5:])
        found: tuple[torch.Tensor, ...] = torch.autograd.grad(made, leaf, grad)
    return found[0]


def _fake(cores: Sequence[torch.Tensor], *how: Any) -> torch.Tensor:
    return cores[0].new_empty(how[7], _width(cores))


def _fake_gradient(
    grad: torch.Tensor, cores: Sequence[torch.Tensor], cache: torch.Tensor | None, *how: Any
) -> list[torch.Tensor]:
    return [torch.empty_like(one) for one in (*cores, *([] if cache is None else [cache]))]


def _fake_weights(grad: torch.Tensor, cores: Sequence[torch.Tensor], *how: Any) -> torch.Tensor:
    return cores[0].new_empty(how[2].numel())


_RUNS: tuple[Any, ...] = (_tt, _gradient, _weights)
_SHAPES: tuple[Any, ...] = (_fake, _fake_gradient, _fake_weights)
for _schema, _run, _shape in zip(_SCHEMAS, _RUNS, _SHAPES, strict=True):
    define(_schema, _run, _shape)


def look_up(cores: Sequence[torch.Tensor], *how: Any) -> torch.Tensor:
    """``slipstream::tt``: bags of rows, without a gradient: [bags, q_1 ... q_d]."""
    rows: torch.Tensor = torch.ops.slipstream.tt.default(list(cores), *how)
    return rows
