"""Embeddings whose table is a tensor train: a product of small cores, some hundred times smaller.

Source: Yin, Acun, Liu and Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation
Models", MLSys 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from slipstream.arguments import whole_number
from slipstream.errors import InvalidArgumentError
from slipstream.native import tt as door
from slipstream.techniques.embedding import tt_init
from slipstream.techniques.embedding.bags import (
    Bags,
    check_mode,
    each,
    expect_tensor,
    normalise,
    padding_row,
    reduced,
)
from slipstream.techniques.embedding.hot_rows import HotRows
from slipstream.techniques.embedding.protocol import CHUNK_ROWS, dense
from slipstream.techniques.embedding.tt_shape import TTShape
from slipstream.techniques.embedding.tt_svd import tt_svd

INITS = ("sampled-gaussian", "gaussian")
_LINE_BYTES = 64

Shapes = Sequence[Sequence[int]] | None
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class _TensorTrain(nn.Module):
    """A table of rows as a tensor train.

    Attributes:
        shape: how rows and columns are factored.
        cores: the parameters, [p, R, q, R'] each: one row's slice of a core lies in one piece.
        hot: the cached rows, or None.
        optimizers: those that step in the backward pass, by parameter; empty without.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        tt_ranks: int | Sequence[int] = (32, 32),
        tt_shapes: Shapes = None,
        padding_idx: int | None = None,
        init: str = "sampled-gaussian",
        init_std: float | None = None,
        cache_rows: int = 0,
        cache_policy: str = "auto",
        fused_optimizer: MakeOptimizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind = dtype or torch.get_default_dtype()
        if not kind.is_floating_point:
            raise InvalidArgumentError("dtype", f"{kind} has no floating point")
        if init not in INITS:
            raise InvalidArgumentError("init", f"'{init}' is not possible", remedy=", ".join(INITS))
        self.shape = TTShape.of(num_embeddings, embedding_dim, tt_ranks, tt_shapes)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_row(padding_idx, num_embeddings)
        self.init = init
        self.init_std = 1 / math.sqrt(3 * num_embeddings) if init_std is None else init_std
        if not 0 <= self.init_std < math.inf:
            raise InvalidArgumentError("init_std", f"{init_std} is not a standard deviation")
        if whole_number("cache_rows", cache_rows, 0) > num_embeddings:
            raise InvalidArgumentError(
                "cache_rows", f"{cache_rows} rows are more than the table's {num_embeddings}"
            )
        self.cores = nn.ParameterList(
            torch.empty(core, device=device, dtype=kind) for core in self.shape.cores
        )
        cache = HotRows(cache_rows, embedding_dim, cache_policy, device, kind)
        self.hot = cache if cache_rows else None
        self.reset_parameters()
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        if fused_optimizer is not None:
            if not callable(fused_optimizer):
                raise InvalidArgumentError(
                    "fused_optimizer", f"{fused_optimizer!r} makes no optimizer",
                    remedy="functools.partial(torch.optim.Adagrad, lr=0.1)",
                )  # fmt: skip
            self._step_in_backward(fused_optimizer)

    @classmethod
    def from_dense(
        cls,
        weight: torch.Tensor,
        tt_ranks: int | Sequence[int] = (32, 32),
        tt_shapes: Shapes = None,
        row_weights: torch.Tensor | None = None,
        **settings: Any,
    ) -> Self:
        """The tensor train nearest to a table, in its dtype and on its device.

        Args:
            weight: [rows, dim].
            row_weights: how much each row's error counts, say how often it is looked up: [rows].
            settings: further arguments of the class.

        Raises:
            InvalidArgumentError: a table that is not finite or has no such shape, weights that are
                negative.
        """
        expect_tensor("weight", weight)
        if weight.dim() != 2:
            raise InvalidArgumentError("weight", f"has {weight.dim()} dimensions, not 2")
        rows, dim = weight.shape
        own = {"tt_ranks": tt_ranks, "tt_shapes": tt_shapes, "device": weight.device}
        made = cls(rows, dim, **{**own, "dtype": weight.dtype, **settings})
        with torch.no_grad():
            found = tt_svd(weight, made.shape, row_weights).cores
            for core, value in zip(made.cores, found, strict=True):
                core.copy_(value)
        return made

    def reset_parameters(self) -> None:
        """Cores whose product has numbers of `init_std`, as near to normal ones as it can be."""
        draw = tt_init.gaussian if self.init == "gaussian" else tt_init.sampled_gaussian
        draw(list(self.cores), self.init_std)

    @property
    def nbytes(self) -> int:
        """Bytes of the cores, and of the cached rows with their table."""
        cached = 0 if self.hot is None else self.hot.weight.nbytes + self.hot.table.nbytes
        return sum(int(core.nbytes) for core in self.cores) + cached

    @property
    def reads_per_id(self) -> float:
        """Cache lines of the slices that one id reads, if no other id of the batch reads them."""
        item = self.cores[0].element_size()
        return float(sum((core[0].numel() * item - 1) / _LINE_BYTES + 1 for core in self.cores))

    @property
    def flops_per_id(self) -> int:
        """Of one row's products, and its addition to a bag."""
        return self.shape.flops + self.embedding_dim

    def materialize(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, int32 or int64, padding too: [*rows.shape, embedding_dim].

        Raises:
            InvalidArgumentError: an id that is no row.
        """
        ids = each(rows, self.cores[0].device)
        made = self._look_up(ids, "sum", padding=-1, counted=False)
        return made.view(*rows.shape, self.embedding_dim)

    def to_dense(self, chunk_rows: int = CHUNK_ROWS) -> torch.Tensor:
        """The whole table: [num_embeddings, embedding_dim], without a gradient; cached rows too.

        Raises:
            InvalidArgumentError: `chunk_rows` is less than 1.
        """
        shape = (self.num_embeddings, self.embedding_dim)
        return dense(self.materialize, shape, self.cores[0], chunk_rows)

    def refresh(self, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
        """Cache the rows that were looked up most; the cache's rows that changed hands, int64.

        Nothing is lost: rows that come are the train's to the bit, and what rows that leave have
        learned is put into the last core.

        Args:
            optimizer: of the parameters; forgets what it remembers of rows that changed hands.

        Raises:
            InvalidArgumentError: there is no cache.
        """
        if self.hot is None:
            raise InvalidArgumentError(
                "cache_rows", "there is no cache to refresh", remedy="cache_rows=1000, say"
            )
        own = self.optimizers.get("hot.weight", optimizer)
        return self.hot.refresh(list(self.cores), own)

    def _look_up(
        self, bags: Bags, mode: str, padding: int | None = None, counted: bool = True
    ) -> torch.Tensor:
        """Bags of rows: [bags, embedding_dim], differentiable."""
        if padding is None:
            padding = -1 if self.padding_idx is None else self.padding_idx
        cache = hot = None
        counted = counted and self.training and not torch.compiler.is_compiling()
        if self.hot is not None:
            # Before the look-up: between it and its backward pass nothing may change.
            if counted and self.hot.due:
                self.refresh()
            cache, hot = self.hot.weight, self.hot.table
        how = (hot, bags.ids, bags.offsets, bags.weights, self.num_embeddings, padding, bags.total,
               door.MODES.index(mode))  # fmt: skip
        cores = list(self.cores)
        trained = [one for one in (*cores, cache, bags.weights) if one is not None]
        made: torch.Tensor
        if not (torch.is_grad_enabled() and any(one.requires_grad for one in trained)):
            made = door.look_up(cores, cache, *how)
        elif cores[0].dtype is not torch.float32:
            door.check(cores, cache, *how)
            made = door.by_reference(cores, cache, *how)
        else:
            made = _Rows.apply(len(cores), *cores, cache, *how)
        if self.hot is not None and counted:
            self.hot.record(bags.ids)
        return made

    def _step_in_backward(self, make: MakeOptimizer) -> None:
        for name, parameter in self.named_parameters():
            self.optimizers[name] = make([parameter])
            hook = _stepping(self.optimizers[name])
            parameter.register_post_accumulate_grad_hook(hook)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        rows, columns = ("x".join(map(str, f)) for f in (self.shape.rows, self.shape.columns))
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, rows {rows}, columns {columns}, "
            f"ranks {list(self.shape.ranks[1:-1])}{padding}"
        )


class TTEmbedding(_TensorTrain):
    """``nn.Embedding`` with its table as a tensor train.

    Args:
        num_embeddings, embedding_dim: of the table it stands for.
        tt_ranks: R_1 to R_(d-1) of d = 2, 3 or 4 cores; one number stands for (R, R).
        tt_shapes: factors of the rows, whose product may be more than `num_embeddings`, and of the
            dimension; balanced ones by default.
        padding_idx: an id whose row is zeros and gets no gradient.
        init: how cores are drawn: ``sampled-gaussian`` or ``gaussian`` (see `tt_init`).
        init_std: of the table's numbers; 1 / sqrt(3 num_embeddings), as in DLRM, by default.
        cache_rows: rows that are kept whole, those looked up most; see `HotRows`.
        cache_policy: ``auto`` counts in training and refreshes by itself, ``manual`` when
            `refresh` is called.
        fused_optimizer: makes the optimizer of a list of parameters; each parameter is then
            stepped in the backward pass, as soon as its gradient is there, and keeps none.

    Raises:
        InvalidArgumentError: a size or rank below 1, factors that do not fit or cannot be found.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of `input`, int32 or int64 of any shape: [*input.shape, embedding_dim].

        Raises:
            InvalidArgumentError: an id that is no row, or no integer.
        """
        bags = each(input, self.cores[0].device)
        return self._look_up(bags, "sum").view(*input.shape, self.embedding_dim)


class TTEmbeddingBag(_TensorTrain):
    """``nn.EmbeddingBag`` with its table as a tensor train.

    Args:
        mode, include_last_offset: as ``nn.EmbeddingBag``; ``sum`` by default.
        num_embeddings, embedding_dim, tt_ranks, tt_shapes, padding_idx, init, init_std, cache_rows,
            cache_policy, fused_optimizer: as `TTEmbedding`.

    Raises:
        InvalidArgumentError: as `TTEmbedding`; an unknown mode.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        tt_ranks: int | Sequence[int] = (32, 32),
        tt_shapes: Shapes = None,
        mode: str = "sum",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        init: str = "sampled-gaussian",
        init_std: float | None = None,
        cache_rows: int = 0,
        cache_policy: str = "auto",
        fused_optimizer: MakeOptimizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_mode(mode)
        super().__init__(
            num_embeddings, embedding_dim, tt_ranks, tt_shapes, padding_idx, init, init_std,
            cache_rows, cache_policy, fused_optimizer, device, dtype,
        )  # fmt: skip
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sums, means or maxima of bags of rows: [bags, embedding_dim]; zeros for empty bags.

        Raises:
            InvalidArgumentError: names the argument and what is wrong with it.
        """
        first = self.cores[0]
        bags = normalise(
            input, offsets, per_sample_weights, mode=self.mode, dtype=first.dtype,
            device=first.device, include_last_offset=self.include_last_offset,
        )  # fmt: skip
        return self._largest(bags) if self.mode == "max" else self._look_up(bags, self.mode)

    def _largest(self, bags: Bags) -> torch.Tensor:
        """Maxima, of rows that are written down."""
        door.check_ids(bags.ids, bags.offsets, self.num_embeddings, bags.total)
        rows = self._look_up(Bags(bags.ids, None, None, bags.ids.numel()), "sum", padding=-1)
        return reduced(rows, bags, "max", self.padding_idx)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


class _Rows(torch.autograd.Function):
    """The gradients of the cores are dense; the products in between are made once more."""

    @staticmethod
    def forward(ctx: Any, count: int, *given: Any) -> torch.Tensor:
        cores, (cache, hot, ids, offsets, weights, *rest) = given[:count], given[count:]
        made = door.look_up(cores, cache, hot, ids, offsets, weights, *rest)
        ctx.save_for_backward(*cores, cache, hot, ids, offsets, weights)
        ctx.count, ctx.rest = count, rest
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        count, saved = ctx.count, ctx.saved_tensors
        cores, how = list(saved[:count]), (*saved[count:], *ctx.rest)
        grad = grad.contiguous()
        ops = torch.ops.slipstream.tt
        needed = ctx.needs_input_grad[1:]
        gradients: list[torch.Tensor | None] = [None] * (count + 1)
        if any(needed[: count + 1]):
            found = ops.gradient(grad, cores, *how)
            gradients[: len(found)] = found
        weights = ops.weights(grad, cores, *how) if needed[count + 4] else None
        return (None, *gradients, None, None, None, weights, *[None] * len(ctx.rest))


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


if TYPE_CHECKING:
    from slipstream.techniques.embedding.protocol import CompressedEmbedding

    def _conforms(one: TTEmbedding, other: TTEmbeddingBag) -> tuple[CompressedEmbedding, ...]:
        return one, other
