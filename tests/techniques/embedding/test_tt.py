"""Tensor-train modules behave like torch's on the expanded table, and refuse the same."""

from __future__ import annotations

import copy
import functools
import io
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import slipstream as ss
from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.modules import CompressedEmbedding

IDS = pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
MODES = pytest.mark.parametrize("mode", ["sum", "mean", "max"])
RANKS = pytest.mark.parametrize("ranks", [(5,), (3, 4), (2, 3, 2)], ids=["2", "3", "4 cores"])
KINDS = pytest.mark.parametrize(
    ("kind", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["fp32", "fp64"]
)


def bag(rows: int = 200, dim: int = 16, ranks: Any = (3, 4), **settings: Any) -> Any:
    torch.manual_seed(0)
    return ss.nn.TTEmbeddingBag(rows, dim, ranks, **{"init_std": 1.0, **settings})


def error(made: torch.Tensor, expected: torch.Tensor) -> float:
    return float((made - expected).detach().abs().max() / expected.detach().abs().max())


def test_the_public_names_resolve() -> None:
    assert ss.embedding.TTEmbedding is ss.nn.TTEmbedding
    assert ss.embedding.TTEmbeddingBag is ss.nn.TTEmbeddingBag
    assert isinstance(bag(), CompressedEmbedding)


@IDS
@MODES
@RANKS
@KINDS
def test_a_bag_equals_torchs_on_the_dense_table(
    dtype: torch.dtype, mode: str, ranks: tuple[int, ...], kind: torch.dtype, bound: float
) -> None:
    module = bag(ranks=ranks, mode=mode, padding_idx=-1, dtype=kind)
    table = module.to_dense(chunk_rows=7)
    ids = torch.randint(0, 200, (150,), dtype=dtype)
    ids[::11] = 199
    offsets = torch.tensor([0, 0, 40, 41, 150], dtype=dtype)
    square = torch.randint(0, 200, (40, 12), dtype=dtype).t()
    weights = torch.rand(150, dtype=kind) if mode == "sum" else None
    for arguments in ((ids, offsets, weights), (square, None, None)):
        expected = functional.embedding_bag(
            arguments[0].long(), table, None if arguments[1] is None else arguments[1].long(),
            mode=mode, per_sample_weights=arguments[2], padding_idx=199,
        )  # fmt: skip
        assert error(module(*arguments), expected) <= bound
    ended = copy.deepcopy(module)
    ended.include_last_offset = True
    assert torch.equal(ended(ids, offsets), module(ids, offsets[:-1]))
    assert module(ids[:0], offsets[:0]).shape == (0, 16)
    assert not module(ids[:0], offsets[:2] * 0).any()


@IDS
def test_an_embedding_equals_torchs_on_the_dense_table(dtype: torch.dtype) -> None:
    module = ss.nn.TTEmbedding(200, 24, (3, 4), padding_idx=3)
    ids = torch.randint(0, 200, (4, 5, 6), dtype=dtype)
    ids[0, 0, 0] = 3
    table = module.to_dense()
    table[3] = 0
    assert error(module(ids), functional.embedding(ids, table)) <= 1e-6
    assert module.materialize(torch.tensor([3])).any()
    assert module(torch.tensor(5)).shape == (24,)


@MODES
@RANKS
def test_gradcheck_of_every_core_and_the_weights(mode: str, ranks: tuple[int, ...]) -> None:
    module = bag(
        30, 8 if len(ranks) < 3 else 16, ranks, mode=mode, dtype=torch.float64, padding_idx=2
    )
    ids, offsets = torch.randint(0, 30, (14,)), torch.tensor([0, 4, 4, 9])
    ids[3:6] = 7
    weights = torch.rand(14, dtype=torch.float64, requires_grad=True) if mode == "sum" else None
    names = [f"cores.{t}" for t in range(len(module.cores))]

    def run(weights: torch.Tensor | None, *cores: torch.Tensor) -> torch.Tensor:
        parameters = dict(zip(names, cores, strict=True))
        made: torch.Tensor = torch.func.functional_call(module, parameters, (ids, offsets, weights))
        return made

    cores = [core.detach().clone().requires_grad_() for core in module.cores]
    assert torch.autograd.gradcheck(run, (weights, *cores))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("ranks", [(5,), (3, 4)])
def test_gradients_in_float32_equal_those_in_float64(mode: str, ranks: tuple[int, ...]) -> None:
    narrow = bag(ranks=ranks, mode=mode, padding_idx=5)
    exact = copy.deepcopy(narrow).double()
    ids, offsets = torch.randint(0, 60, (90,)), torch.arange(0, 90, 9)
    found = []
    for module in (narrow, exact):
        own = torch.linspace(-1, 1, 90).to(module.cores[0].dtype) if mode == "sum" else None
        own = None if own is None else own.requires_grad_()
        loss = module(ids, offsets, own).square().sum()
        inputs = [*module.cores, *([] if own is None else [own])]
        found.append(torch.autograd.grad(loss, inputs))
    for single, double in zip(*found, strict=True):
        assert error(single, double) <= 1e-5


@pytest.mark.parametrize("ranks", [(5,), (3, 4), (2, 3, 2)])
def test_a_repeated_id_gives_reproducible_bits(ranks: tuple[int, ...]) -> None:
    ids = torch.cat([torch.full((1000,), 17), torch.randint(0, 200, (1000,))])
    offsets = torch.arange(0, 2000, 50)
    gradients = []
    for _ in range(3):
        module = bag(ranks=ranks)
        module(ids, offsets).square().sum().backward()
        gradients.append([core.grad for core in module.cores])
    for again in gradients[1:]:
        assert all(map(torch.equal, gradients[0], again))


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.SGD, lr=0.05),
        functools.partial(torch.optim.Adagrad, lr=0.05),
        functools.partial(torch.optim.Adam, lr=0.01),
    ],
    ids=["SGD", "Adagrad", "Adam"],
)
def test_stepping_in_the_backward_pass_equals_stepping_after_it(make: Any) -> None:
    fused, plain = bag(fused_optimizer=make), bag()
    optimizer = make(list(plain.parameters()))
    ids, aim = torch.randint(0, 200, (50, 32, 3)), torch.randn(50, 32, 16)
    for batch, target in zip(ids, aim, strict=True):
        (fused(batch) - target).square().mean().backward()
        optimizer.zero_grad()
        (plain(batch) - target).square().mean().backward()
        optimizer.step()
    assert all(core.grad is None for core in fused.cores)
    assert error(fused.to_dense(), plain.to_dense()) <= 1e-5
    assert error(fused.to_dense(), bag().to_dense()) > 0.01


def test_checkpoints_and_copies_preserve_every_row() -> None:
    module = bag(cache_rows=8, cache_policy="manual")
    ids = torch.randint(0, 40, (64, 3))
    module(ids)
    module.refresh()
    with torch.no_grad():
        module.hot.weight += 0.1
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    other = bag(cache_rows=8, cache_policy="manual")
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(other.to_dense(), module.to_dense())
    assert all(map(torch.equal, other.hot.counts(), module.hot.counts()))
    assert torch.equal(copy.deepcopy(module)(ids), module(ids))


def test_compiled_modules_look_up_the_same_rows() -> None:
    module = bag()
    ids = torch.randint(0, 200, (8, 5))
    made = torch.compile(module, backend="aot_eager", fullgraph=True)(ids)
    assert torch.equal(made, module(ids))
    assert torch.equal(torch.export.export(module, (ids,)).module()(ids), made)
    made.square().sum().backward()
    found = [core.grad.clone() for core in module.cores]
    module.zero_grad()
    module(ids).square().sum().backward()
    assert all(map(torch.equal, found, [core.grad for core in module.cores]))


def test_training_learns_like_a_dense_table() -> None:
    torch.manual_seed(1)
    target = torch.randn(64, 4)
    embedding = ss.nn.TTEmbedding(64, 8, (8, 8), init_std=1.0)
    head = nn.Linear(8, 4)
    optimizer = torch.optim.Adam([*embedding.parameters(), *head.parameters()], 0.02)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (head(embedding(torch.arange(64))) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.25 * losses[0]


def test_invalid_arguments_are_named() -> None:
    module = bag(100, 16, mode="mean")
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    for arguments, message in (
        ((ids - 2, offsets), r"^input: .* -1\b.*\bplace 0\b"),
        ((ids + 98, offsets), r"^input: .* 100\b.*\bplace 1\b"),
        ((ids, torch.tensor([0, 4])), "offsets: offset 4"),
        ((ids, torch.tensor([0, 2, 1])), "offsets: offset 1"),
        ((ids, torch.tensor([1, 2])), "offsets: the first"),
        ((ids,), "^offsets: "),
        ((ids[None], offsets), r"^offsets: .*\bdimension\b"),
        ((ids.float(), offsets), r"input: is torch\.float32"),
        ((ids.tolist(), offsets), r"^input: .*\blist\b"),
        ((ids.numpy(), offsets), r"^input: .*\bndarray\b"),
        ((ids, [0, 2]), "offsets: is a list"),
        ((ids, offsets, torch.ones(3)), r"^per_sample_weights: .*\bsum\b"),
        ((ids.to("meta"), offsets), r"^input: .*\bmeta\b"),
    ):
        for ranks, mode in (((3, 4), "mean"), ((2, 2, 2), "mean"), ((3, 4), "max")):
            other = bag(100, 16, ranks, mode=mode)
            with pytest.raises(InvalidArgumentError, match=message):
                other(*arguments)
            with pytest.raises(InvalidArgumentError, match=message):
                other.double()(*arguments)
    summed = bag(100, 16)
    for weights, message in (
        (torch.ones(2), r"^per_sample_weights: .*\b2\b"),
        ([1.0, 2.0, 3.0], "per_sample_weights: is a list"),
        (torch.ones(3, dtype=torch.float64), r"per_sample_weights: is torch\.float64"),
        (torch.tensor([1.0, math.nan, 1.0]), r"^per_sample_weights: .*\bplace 1\b.*\bnan\b"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            summed(ids, offsets, weights)
    with pytest.raises(InvalidArgumentError, match="input: the id -1"):
        ss.nn.TTEmbedding(10, 8)(torch.tensor([[-1]]))
    with pytest.raises(InvalidArgumentError, match="chunk_rows"):
        module.to_dense(0)
    with pytest.raises(InvalidArgumentError, match=r"^cache_rows: "):
        module.refresh()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 0}, "num_embeddings: 0"),
        ({"rows": 1e6}, r"num_embeddings: 1000000\.0 is not an integer"),
        ({"dim": 16.0}, "embedding_dim: 16.0 is not"),
        ({"ranks": 8.0}, "tt_ranks: 8.0 is not"),
        ({"ranks": "8"}, "tt_ranks: '8' is not"),
        ({"ranks": True}, "tt_ranks: True"),
        ({"tt_shapes": (6, 6, 6)}, "tt_shapes: must be 3 factors"),
        ({"tt_shapes": ((6.0, 6, 6), (2, 2, 4))}, "tt_shapes: 6.0 is not"),
        ({"padding_idx": 1.5}, "padding_idx: 1.5 is not"),
        ({"cache_rows": 1.5}, "cache_rows: 1.5 is not"),
        ({"fused_optimizer": "adam"}, "fused_optimizer: 'adam'"),
        ({"dim": 0}, "embedding_dim: 0"),
        ({"dim": 17}, "embedding_dim: 17 cannot be split into 3 factors"),
        ({"dim": 4}, "embedding_dim: 4 cannot be split into 3 factors"),
        ({"ranks": (0, 3)}, "tt_ranks"),
        ({"ranks": ()}, "tt_ranks: has 0 ranks"),
        ({"ranks": (2, 2, 2, 2)}, "tt_ranks: has 4 ranks"),
        ({"tt_shapes": ((5, 5, 5), (2, 2, 4))}, "tt_shapes: 125 rows"),
        ({"tt_shapes": ((6, 6, 6), (2, 2, 2))}, "tt_shapes: columns"),
        ({"tt_shapes": ((6, 6), (2, 8))}, "tt_shapes: must be 3 factors"),
        ({"tt_shapes": ((-6, -6, 6), (2, 2, 4))}, "tt_shapes"),
        ({"tt_shapes": ((2**21, 2**21, 2**21), (2, 2, 4))}, r"tt_shapes: .*exceed 2\^63"),
        ({"rows": 2**60}, r"num_embeddings: .*exceeds 2\^63"),
        ({"padding_idx": 200}, "padding_idx: 200"),
        ({"mode": "min"}, "mode: 'min'"),
        ({"init": "uniform"}, "init: 'uniform'"),
        ({"init_std": math.nan}, "init_std"),
        ({"cache_rows": -1}, "cache_rows: -1"),
        ({"cache_rows": 201}, "cache_rows: 201"),
        ({"cache_rows": 5, "cache_policy": "lru"}, "cache_policy: 'lru'"),
        ({"dtype": torch.int64}, "dtype"),
    ],
)
def test_invalid_trains_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        bag(**settings)


def test_the_nearest_dimension_is_suggested() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        bag(dim=17)
    assert "use 18" in str(caught.value) or "use 16" in str(caught.value)
