"""Embeddings whose table is a tensor train: a product of small cores, about 100 times smaller.

Source: Yin, Acun, Liu and Wu, "TT-Rec: Tensor Train Compression for Deep Learning Recommendation
Models", MLSys 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import takewhile
from typing import Any, ClassVar, Self

import torch
from torch import nn

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding import tt_init
from slipstream.techniques.embedding.bags import Bags, check_mode, expect_tensor, reduced
from slipstream.techniques.embedding.formats.format import (
    Choice,
    Exchange,
    Settings,
    Start,
    TableFacts,
    TableFormat,
    with_errors,
)
from slipstream.techniques.embedding.hot_rows import HotRows, cache_bytes
from slipstream.techniques.embedding.kernels import tt as kernels
from slipstream.techniques.embedding.kernels import tt_reference as trains
from slipstream.techniques.embedding.modules import (
    ByBag,
    ById,
    CompressedModule,
    Rows,
    called_as,
)
from slipstream.techniques.embedding.tt_shape import TTShape
from slipstream.techniques.embedding.tt_svd import tt_svd
from slipstream.techniques.embedding.weighting import relative_error

INITS = ("sampled-gaussian", "gaussian")
# From 128 down to 1, two per halving.
_RANKS = sorted({round(2 ** (step / 2)) for step in range(15)}, reverse=True)
_MIN_HOT = 8

Shapes = Sequence[Sequence[int]] | None
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class _TensorTrain(CompressedModule):
    """A table of rows as a tensor train.

    Attributes:
        shape: factors of rows and columns.
        cores: the parameters, [p, R, q, R'] each, so that a row's slice is contiguous.
        hot: the cached rows, or None.
        optimizers: optimizers that step in the backward pass, by parameter.
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
        kind = dtype or torch.get_default_dtype()
        if not kind.is_floating_point:
            raise InvalidArgumentError("dtype", f"{kind} is not a floating-point dtype")
        if init not in INITS:
            raise InvalidArgumentError(
                "init", f"'{init}' is unknown", remedy=f"use one of {', '.join(INITS)}"
            )
        shape = TTShape.of(num_embeddings, embedding_dim, tt_ranks, tt_shapes)
        super().__init__(num_embeddings, embedding_dim, padding_idx)
        self.shape = shape
        self.init = init
        self.init_std = 1 / math.sqrt(3 * num_embeddings) if init_std is None else init_std
        if not 0 <= self.init_std < math.inf:
            raise InvalidArgumentError("init_std", f"{init_std} is not a standard deviation")
        if as_integer("cache_rows", cache_rows, 0) > num_embeddings:
            raise InvalidArgumentError(
                "cache_rows", f"{cache_rows} exceeds the table's {num_embeddings} rows"
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
                    "fused_optimizer", f"{fused_optimizer!r} does not create an optimizer",
                    remedy="pass functools.partial(torch.optim.Adagrad, lr=0.1), for example",
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
        """Return the tensor train nearest to a table, in its dtype and on its device.

        Args:
            weight: [rows, dim].
            row_weights: weights of the rows' errors, such as their look-ups: [rows].
            settings: further arguments of the class.

        Raises:
            InvalidArgumentError: the table is not finite or cannot have the shape, or a weight is
                negative.
        """
        expect_tensor("weight", weight)
        if weight.dim() != 2:
            raise InvalidArgumentError("weight", f"has {weight.dim()} dimensions, not 2")
        rows, dim = weight.shape
        arguments = {"tt_ranks": tt_ranks, "tt_shapes": tt_shapes, "device": weight.device}
        module = cls(rows, dim, **{**arguments, "dtype": weight.dtype, **settings})
        with torch.no_grad():
            cores = tt_svd(weight, module.shape, row_weights).cores
            for core, value in zip(module.cores, cores, strict=True):
                core.copy_(value)
        return module

    def reset_parameters(self) -> None:
        """Draw cores whose product has standard deviation `init_std` and is near normal."""
        draw = tt_init.gaussian if self.init == "gaussian" else tt_init.sampled_gaussian
        draw(list(self.cores), self.init_std)

    @property
    def parameter(self) -> torch.Tensor:
        """The first core."""
        first: torch.Tensor = self.cores[0]
        return first

    def exported_rows(self) -> nn.Module:
        """Return products of slices; with cached rows the dense table."""
        return _ExportedTrain(self.cores) if self.hot is None else _ExportedTable(self.to_dense())

    def refresh(self, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
        """Cache the rows with most look-ups, and return the reassigned rows of the cache, int64.

        New cached rows are bit-identical to the train's, and the last core is refitted to evicted
        rows.

        Args:
            optimizer: optimizer of the parameters; its state of reassigned rows is set to zero.

        Raises:
            InvalidArgumentError: the module has no cache.
        """
        if self.hot is None:
            raise InvalidArgumentError(
                "cache_rows",
                "is 0: the module has no cache to refresh",
                remedy="pass cache_rows=1000, for example",
            )
        steps_rows = self.optimizers.get("hot.weight", optimizer)
        return self.hot.refresh(list(self.cores), steps_rows)

    def look_up(
        self, bags: Bags, mode: str | None, padding_idx: int | None, counted: bool = True
    ) -> torch.Tensor:
        """Return fused sums and means of rows; maxima need the materialized rows."""
        if mode == "max":
            kernels.check_ids(bags.ids, bags.offsets, self.num_embeddings, bags.total)
            single = Bags(bags.ids, None, None, bags.ids.numel())
            rows_of_ids = self.look_up(single, None, None, counted)
            return reduced(rows_of_ids, bags, "max", padding_idx)
        padding = -1 if padding_idx is None else padding_idx
        cache = hot = None
        counted = counted and self.training and not torch.compiler.is_compiling()
        if self.hot is not None:
            # Before the look-up, since parameters must not change until its backward pass.
            if counted and self.hot.due:
                self.refresh()
            cache, hot = self.hot.rows(), self.hot.table
        how = (hot, bags.ids, bags.offsets, bags.weights, self.num_embeddings, padding, bags.total,
               kernels.MODES.index(mode or "sum"))  # fmt: skip
        cores = list(self.cores)
        inputs = [tensor for tensor in (*cores, cache, bags.weights) if tensor is not None]
        rows: torch.Tensor
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
            rows = kernels.look_up(cores, cache, *how)
        elif cores[0].dtype is not torch.float32 or _by_steps(cores):
            rows = kernels.in_steps(cores, cache, *how)
        else:
            rows = _Rows.apply(len(cores), *cores, cache, *how)
        if self.hot is not None and counted:
            self.hot.record(bags.ids)
        return rows

    def _step_in_backward(self, make: MakeOptimizer) -> None:
        for name, parameter in self.named_parameters():
            self.optimizers[name] = optimizer = make([parameter])
            parameter.register_post_accumulate_grad_hook(partial(_step, optimizer))

    def _format_repr(self) -> str:
        rows, columns = ("x".join(map(str, f)) for f in (self.shape.rows, self.shape.columns))
        return f", rows {rows}, columns {columns}, ranks {list(self.shape.ranks[1:-1])}"


def _by_steps(cores: list[torch.Tensor]) -> bool:
    """Whether to compute rows in steps that torch differentiates.

    With kernels for the CUDA device the operator saves nothing, and its backward pass would compute
    the rows again. Compiled code calls the operator, which is opaque to the compiler.
    """
    return not torch.compiler.is_compiling() and kernels.on_device(cores) is not None


class TTEmbedding(_TensorTrain, ById):
    """``nn.Embedding`` with its table as a tensor train.

    Args:
        num_embeddings, embedding_dim: size of the represented table.
        tt_ranks: R_1 to R_(d-1) of d = 2, 3 or 4 cores; one integer R means (R, R).
        tt_shapes: factors of the rows, whose product is at least `num_embeddings`, and of the
            dimension; balanced ones by default.
        padding_idx: an id whose row is zero and gets no gradient.
        init: initialization of cores: ``sampled-gaussian`` or ``gaussian`` (see `tt_init`).
        init_std: standard deviation of the table; 1 / sqrt(3 num_embeddings), as in DLRM, by
            default.
        cache_rows: number of the most frequent rows to cache; see `HotRows`.
        cache_policy: ``auto`` refreshes by counts in training, ``manual`` when `refresh` is called.
        fused_optimizer: function from a list of parameters to their optimizer, which then steps in
            the backward pass as soon as a gradient is complete, and frees it.

    Raises:
        InvalidArgumentError: a size or rank is below 1, or factors do not fit or do not exist.
    """


class TTEmbeddingBag(_TensorTrain, ByBag):
    """``nn.EmbeddingBag`` with its table as a tensor train.

    Args:
        mode, include_last_offset: those of ``nn.EmbeddingBag``; ``sum`` by default.
        num_embeddings, embedding_dim, tt_ranks, tt_shapes, padding_idx, init, init_std, cache_rows,
            cache_policy, fused_optimizer: those of `TTEmbedding`.

    Raises:
        InvalidArgumentError: an argument of `TTEmbedding` is invalid, or the mode is unknown.
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


class _Rows(torch.autograd.Function):
    """Look-up of bags with dense gradients; the backward pass recomputes partial products."""

    @staticmethod
    def forward(ctx: Any, count: int, *inputs: Any) -> torch.Tensor:
        cores, (cache, hot, ids, offsets, weights, *rest) = inputs[:count], inputs[count:]
        bags = kernels.look_up(cores, cache, hot, ids, offsets, weights, *rest)
        ctx.save_for_backward(*cores, cache, hot, ids, offsets, weights)
        ctx.count, ctx.rest = count, rest
        return bags

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
            of_parameters = ops.gradient(grad, cores, *how)
            gradients[: len(of_parameters)] = of_parameters
        weights = ops.weights(grad, cores, *how) if needed[count + 4] else None
        return (None, *gradients, None, None, None, weights, *[None] * len(ctx.rest))


def _step(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


class _ExportedTrain(Rows):
    """Rows of a tensor train, as products of slices."""

    def __init__(self, cores: nn.ParameterList) -> None:
        super().__init__()
        if cores[0].dtype is not torch.float32:
            raise InvalidArgumentError(
                "model", f"has a tensor train of {cores[0].dtype}, not float32"
            )
        self.cores = cores

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return trains.rows_of(list(self.cores), ids)


class _ExportedTable(Rows):
    """Rows of a dense table."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(table, requires_grad=False)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight)


class TT(TableFormat):
    """`TTEmbedding` of three cores with equal ranks."""

    name: ClassVar[str] = "tt"

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Yield descending ranks; none if the dimension does not have three factors."""
        numbers = _numbers(table)

        def error(rank: int) -> float:
            if table.weight is None:
                return _usual_error(table, numbers[rank])
            train = TTEmbedding.from_dense(table.weight, rank, row_weights=table.shares)
            return relative_error(table.weight, train.to_dense(), table.shares)

        for rank, lost in with_errors(error, list(numbers)):
            nbytes = numbers[rank] * table.item_bytes
            yield Choice(self.name, {"rank": rank}, nbytes, lost)

    def module(self, exchange: Exchange, start: Start) -> Any:
        """Return a random train, or the nearest to a trained table.

        The setting ``cores`` is 3 by default.
        """
        table, hot, ranks = exchange.table, exchange.hot, _ranks_of(exchange.settings)
        kind, arguments = called_as(exchange.old, TTEmbedding, TTEmbeddingBag)
        if hot:
            arguments |= {"cache_rows": len(hot), "cache_policy": "manual"}
        module: Any
        if table.weight is not None:
            module = kind.from_dense(table.weight, ranks, row_weights=table.shares, **arguments)
        else:
            # With cached rows the train holds rare ids only, which are best left near zero.
            std = start.std if hot else max(start.std, tt_init.MIN_STD)
            arguments |= {"init_std": std, **start.where}
            module = kind(table.rows, table.dim, ranks, **arguments)
        if hot:
            module.hot.record(torch.tensor(hot))
            module.refresh()
        if hot and table.weight is not None:
            with torch.no_grad():
                module.hot.weight.copy_(table.weight[module.hot.ids])
        return module

    def trained(self, table: TableFacts, settings: Settings, nbytes: int) -> tuple[int, ...]:
        """Return the sizes of the cores and of the cached rows."""
        shape = TTShape.of(table.rows, table.dim, _ranks_of(settings))
        hot = settings.get("hot", ())
        cached = (len(hot) * table.dim,) if isinstance(hot, tuple) and hot else ()
        return (*map(math.prod, shape.cores), *cached)


class HotTT(TT):
    """`TTEmbedding` with its most frequent rows cached; requires counts of look-ups."""

    name: ClassVar[str] = "hot_tt"

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """Yield all ranks with powers of two of cached rows, which fill the hash table."""
        if table.shares is None:
            return
        numbers, shares = _numbers(table), table.shares
        order = torch.argsort(shares, descending=True, stable=True)

        @cache
        def tails(rank: int) -> torch.Tensor:
            """Return the error by the number of first rows of `order` that are cached."""
            if table.weight is None:
                lost, whole = shares * _usual_error(table, numbers[rank]), 1.0
            else:
                rows = table.weight.detach().double().cpu()
                train = TTEmbedding.from_dense(table.weight, rank, row_weights=shares)
                lost = (rows - train.to_dense().double().cpu()).square().sum(1) * shares
                whole = float((rows.square().sum(1) * shares).sum()) or 1.0
            return lost[order].flip(0).cumsum(0).flip(0) / whole

        def error(count: int, rank: int) -> float:
            return float(tails(rank)[count])

        powers = (_MIN_HOT << doubled for doubled in range(table.rows.bit_length()))
        for count in takewhile(lambda count: count < table.rows, powers):
            hot = tuple(sorted(order[:count].tolist()))
            for rank, lost in with_errors(partial(error, count), list(numbers)):
                nbytes = numbers[rank] * table.item_bytes
                nbytes += cache_bytes(count, table.dim, table.item_bytes)
                if nbytes < table.nbytes:
                    yield Choice(self.name, {"rank": rank, "hot": hot}, nbytes, lost)


def _ranks_of(settings: Settings) -> tuple[int, ...]:
    """Return the ranks of a train, which are equal; it has three cores by default."""
    rank, cores = settings["rank"], settings.get("cores", 3)
    assert isinstance(rank, int)
    assert isinstance(cores, int)
    return (rank,) * (cores - 1)


def _numbers(table: TableFacts) -> dict[int, int]:
    """Return parameters of trains smaller than the table, by descending rank."""
    try:
        numbers = {rank: TTShape.of(table.rows, table.dim, rank).numbers for rank in _RANKS}
    except InvalidArgumentError:
        return {}
    return {rank: number for rank, number in numbers.items() if number < table.rows * table.dim}


def _usual_error(table: TableFacts, numbers: int) -> float:
    """Return the error of a train of unordered ids, which fits as many numbers as it has."""
    return 1 - numbers / (table.rows * table.dim)
