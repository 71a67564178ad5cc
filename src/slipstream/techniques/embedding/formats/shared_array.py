"""`SharedArray`: the array of numbers that hashed embedding tables share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.bags import Bags
from slipstream.techniques.embedding.kernels import robe as kernels
from slipstream.units import parse_bytes

_VERSION = 1


class SharedArray(nn.Module):
    """One array of numbers, of which embedding tables read hashed blocks.

    The position of a number depends only on `seed`, the table's id, the row and the block. It is
    equal on all devices, for int32 and int64 ids, and in all versions of the package. These
    settings are saved with the array, and an array with other settings cannot be loaded.

    Args:
        size: numbers in the array, or its bytes, such as ``"100MiB"``.
        block: consecutive numbers per hash. Longer blocks are faster and collide less.
        sign: whether to multiply the numbers of a row by hashed signs, which makes inner products
            of rows unbiased.
        init_std: standard deviation of the initial normal numbers; 1, the default, is that of
            ``nn.Embedding``.
        seed: seed of the hashes. The initial numbers depend on ``torch.manual_seed`` instead.
        grad_scale: factor of the array's gradient, which sums the gradients of all weights that a
            number represents.

    Attributes:
        array: the parameter, [size].

    Raises:
        InvalidArgumentError: a size or block is below 1, or the block exceeds the array.

    Source: Desai, Chou and Shrivastava, "Random Offset Block Embedding (ROBE) for compressed
    embedding tables in deep learning recommendation systems", MLSys 2022.
    """

    def __init__(
        self,
        size: int | str,
        *,
        block: int = 32,
        sign: bool = True,
        init_std: float = 1.0,
        seed: int = 0,
        grad_scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind = dtype or torch.get_default_dtype()
        if not kind.is_floating_point:
            raise InvalidArgumentError("dtype", f"{kind} is not a floating-point dtype")
        if isinstance(size, str):
            numbers = parse_bytes(size) // kind.itemsize
        else:
            numbers = as_integer("size", size)
        block, seed = as_integer("block", block), as_integer("seed", seed, 0)
        if numbers < block:
            raise InvalidArgumentError(
                "size", f"{numbers} numbers are less than a block of {block}",
                remedy="pass a larger size or a smaller block",
            )  # fmt: skip
        if not 0 <= init_std < math.inf:
            raise InvalidArgumentError("init_std", f"{init_std} is not a standard deviation")
        if seed >= 2**63:
            raise InvalidArgumentError("seed", f"{seed} is not in [0, 2^63)")
        if not (isinstance(grad_scale, int | float) and math.isfinite(grad_scale)):
            raise InvalidArgumentError("grad_scale", f"{grad_scale!r} is not a finite number")
        self.block, self.sign, self.seed, self.grad_scale = block, sign, seed, grad_scale
        self.init_std = init_std
        self.array = nn.Parameter(torch.empty(numbers, device=device, dtype=kind))
        self._taken: set[int] = set()
        self.reset_parameters()

    @classmethod
    def compressing(
        cls, tables: Sequence[tuple[int, int]], ratio: float, **settings: Any
    ) -> SharedArray:
        """Return an array `ratio` times smaller than the total of tables of (rows, dimension).

        Raises:
            InvalidArgumentError: `ratio` is not positive, or the array is smaller than a block.
        """
        if not ratio > 0:
            raise InvalidArgumentError("ratio", f"{ratio} is not positive")
        numbers = sum(rows * dimension for rows, dimension in tables)
        return cls(max(1, round(numbers / ratio)), **settings)

    def reset_parameters(self) -> None:
        """Draw normal numbers of `init_std`."""
        nn.init.normal_(self.array, std=self.init_std)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.array.nbytes

    def take(self, table_id: int | None = None) -> int:
        """Reserve the id of a table, by default the next free one, and return it.

        Raises:
            InvalidArgumentError: the id is negative or in use.
        """
        if table_id is None:
            table_id = max(self._taken, default=-1) + 1
        table_id = as_integer("table_id", table_id, 0)
        if table_id in self._taken:
            raise InvalidArgumentError(
                "table_id", f"{table_id} is in use by another table of this array"
            )
        self._taken.add(table_id)
        return table_id

    def look_up(self, bags: Bags, tables: torch.Tensor, width: int, mode: str) -> torch.Tensor:
        """Return bags of rows of `tables` (see `tables_of`): [bags, width], differentiable.

        Raises:
            InvalidArgumentError: an id is out of range, or offsets decrease.
        """
        ids, offsets, weights, total, _ = bags
        how = (ids, offsets, weights, tables, total, width, self.block, self.sign,
               kernels.MODES.index(mode))  # fmt: skip
        array = self.array
        if not torch.is_grad_enabled() or not (
            array.requires_grad or (weights is not None and weights.requires_grad)
        ):
            plain: torch.Tensor = kernels.robe(array, *how)
            return plain
        if array.dtype is not torch.float32:
            return _scaled(array, self.grad_scale, how)
        rows: torch.Tensor = _Bags.apply(array, self.grad_scale, *how)
        return rows

    def get_extra_state(self) -> dict[str, int]:
        """Return the settings of the hashes, which are saved with the array."""
        return {
            "version": _VERSION, "size": self.array.numel(), "block": self.block,
            "sign": int(self.sign), "seed": self.seed,
        }  # fmt: skip

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Check that a saved array has the same hashes.

        Raises:
            InvalidArgumentError: the settings of the hashes differ.
        """
        for key, here in self.get_extra_state().items():
            if state.get(key) != here:
                raise InvalidArgumentError(
                    "state_dict", f"the saved array has {key} {state.get(key)}, this one {here}",
                    remedy="create the SharedArray with the saved settings",
                )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.array.numel()}, block={self.block}, sign={self.sign}, seed={self.seed}"


def tables_of(seed: int, tables: Sequence[tuple[int, int, int, int | None]]) -> torch.Tensor:
    """Return the operator's description of tables, int64 [tables, 4].

    Args:
        tables: id, rows, dimension and padding row of each table.

    Raises:
        InvalidArgumentError: a table has no rows or columns, or at least 2^63 numbers.
    """
    described = []
    for number, rows, dimension, padding in tables:
        rows = as_integer("num_embeddings", rows)
        dimension = as_integer("embedding_dim", dimension)
        if rows * dimension >= 2**63:
            raise InvalidArgumentError("num_embeddings", f"{rows} x {dimension} exceeds 2^63")
        key = kernels.table_key(seed, number)
        described.append([key, rows, dimension, -1 if padding is None else padding])
    return torch.tensor(described, dtype=torch.int64, device="cpu")


def _scaled(array: torch.Tensor, scale: float, how: tuple[Any, ...]) -> torch.Tensor:
    """Look up bags of dtypes without a kernel, twice differentiable by torch."""
    with torch.no_grad():
        torch.ops.slipstream.robe.default(array, *how)  # for its checks
    if scale != 1.0:
        array = array * scale + (array * (1.0 - scale)).detach()
    return kernels.by_reference(array, *how)


class _Bags(torch.autograd.Function):
    """Look-up of bags whose gradient is dense; the backward pass recomputes the hashes."""

    @staticmethod
    def forward(ctx: Any, array: torch.Tensor, scale: float, *how: Any) -> torch.Tensor:
        bags: torch.Tensor = torch.ops.slipstream.robe.default(array, *how)
        maxima = bags if how[-1] == kernels.MODES.index("max") else None
        ctx.save_for_backward(array, *how[:4], maxima)
        ctx.scale, ctx.how = scale, how[4:]
        return bags

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        array, *how, maxima = ctx.saved_tensors
        how += ctx.how
        grad = grad.contiguous()
        ops = torch.ops.slipstream.robe
        array_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            array_gradient = ops.gradient(grad, array, maxima, *how, ctx.scale)
        if ctx.needs_input_grad[4]:
            weight_gradient = ops.weights(grad, array, *how)
        return (array_gradient, None, None, None, weight_gradient, *[None] * 6)
