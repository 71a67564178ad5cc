"""ROBE modules behave like torch's on the expanded table, and refuse what torch's refuse."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import slipstream as ss
from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.techniques.embedding.modules import CompressedEmbedding

IDS = pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
MODES = pytest.mark.parametrize("mode", ["sum", "mean", "max"])


def pool(size: int = 3000, **settings: Any) -> Any:
    torch.manual_seed(0)
    return ss.nn.SharedArray(size, **{"block": 16, **settings})


def test_the_public_names_resolve() -> None:
    assert ss.embedding.SharedArray is ss.nn.SharedArray
    assert ss.embedding.ROBEEmbeddingCollection is ss.nn.ROBEEmbeddingCollection
    assert isinstance(ss.nn.ROBEEmbedding(10, 8, pool()), CompressedEmbedding)


@IDS
@MODES
@pytest.mark.parametrize("block", [8, 16, 64, 100])
def test_a_bag_equals_torchs_on_the_dense_table(dtype: torch.dtype, mode: str, block: int) -> None:
    bag = ss.nn.ROBEEmbeddingBag(200, 32, pool(block=block), mode=mode, padding_idx=-1)
    table = bag.to_dense(chunk_rows=7)
    ids = torch.randint(0, 200, (150,), dtype=dtype)
    ids[::11] = 199
    offsets = torch.tensor([0, 0, 40, 41, 150], dtype=dtype)
    square = torch.randint(0, 200, (40, 12), dtype=dtype).t()
    weights = torch.rand(150) if mode == "sum" else None
    for arguments in ((ids, offsets, weights), (square, None, None)):
        made = bag(*arguments)
        expected = functional.embedding_bag(
            arguments[0].long(), table, None if arguments[1] is None else arguments[1].long(),
            mode=mode, per_sample_weights=arguments[2], padding_idx=199,
        )  # fmt: skip
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    ended = ss.nn.ROBEEmbeddingBag(
        200, 32, bag.pool, mode=mode, padding_idx=199, include_last_offset=True
    )
    ended._padded = bag._padded
    assert torch.equal(ended(ids, offsets), bag(ids, offsets[:-1]))
    assert bag(ids[:0], offsets[:0]).shape == (0, 32)
    assert not bag(ids[:0], offsets[:2] * 0).any()


@IDS
def test_an_embedding_equals_torchs_on_the_dense_table(dtype: torch.dtype) -> None:
    embedding = ss.nn.ROBEEmbedding(200, 24, pool(), padding_idx=3)
    ids = torch.randint(0, 200, (4, 5, 6), dtype=dtype)
    ids[0, 0, 0] = 3
    table = embedding.to_dense()
    table[3] = 0
    assert torch.equal(embedding(ids), functional.embedding(ids, table))
    assert torch.equal(
        embedding(ids.transpose(0, 2)), functional.embedding(ids.transpose(0, 2), table)
    )
    assert embedding.materialize(torch.tensor([3])).any()
    assert embedding(torch.tensor(5)).shape == (24,)


@MODES
def test_gradients_equal_torchs(mode: str) -> None:
    shared = pool(500, block=16)
    bag = ss.nn.ROBEEmbeddingBag(80, 16, shared, mode=mode, padding_idx=5)
    other = ss.nn.ROBEEmbedding(60, 24, shared)
    ids, offsets = torch.randint(0, 60, (90,)), torch.arange(0, 90, 9)
    weights = torch.rand(90, requires_grad=True) if mode == "sum" else None
    doubled = copy.deepcopy(nn.ModuleList([bag, other])).double()
    losses = []
    for module, two in ((bag, other), doubled):
        own = None if weights is None else weights.detach().to(module.pool.array.dtype)
        own = None if own is None else own.requires_grad_()
        loss = module(ids, offsets, own).square().sum() + two(ids).pow(3).sum()
        losses.append(
            torch.autograd.grad(loss, [module.pool.array, *([] if own is None else [own])])
        )
    for found, exact in zip(*losses, strict=True):
        error = (found - exact).abs().max() / exact.abs().max()
        assert error <= 1e-6, float(error)


@MODES
def test_gradcheck_in_float64(mode: str) -> None:
    shared = pool(60, block=8, dtype=torch.float64)
    bag = ss.nn.ROBEEmbeddingBag(30, 12, shared, mode=mode)
    ids, offsets = torch.randint(0, 30, (14,)), torch.tensor([0, 4, 4, 9])
    weights = torch.rand(14, dtype=torch.float64, requires_grad=True) if mode == "sum" else None

    def run(array: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        # The module is a function of its parameter.
        parameters = {"pool.array": array}
        made: torch.Tensor = torch.func.functional_call(bag, parameters, (ids, offsets, weights))
        return made

    array = shared.array.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (array, weights))


def test_grad_scale_multiplies_the_gradient() -> None:
    ids = torch.randint(0, 50, (40,))
    for dtype in (torch.float32, torch.float64):
        gradients = []
        for scale in (1.0, 0.25):
            embedding = ss.nn.ROBEEmbedding(50, 16, pool(grad_scale=scale, dtype=dtype))
            embedding(ids).square().sum().backward()
            gradients.append(embedding.pool.array.grad)
        torch.testing.assert_close(gradients[1], gradients[0] * 0.25)


def test_a_collection_equals_its_separate_tables() -> None:
    shared = pool(2000)
    sizes = {"film": (300, 32), "genre": (20, 16), "user": (1000, 24)}
    together = ss.nn.ROBEEmbeddingCollection(sizes, shared, mode="sum")
    apart = pool(2000)
    alone = [ss.nn.ROBEEmbeddingBag(*size, apart, mode="sum") for size in sizes.values()]
    ids = torch.stack([torch.randint(0, rows, (50, 3)) for rows, _ in sizes.values()])
    made = together(ids.view(150, 3))
    expected = torch.cat([bag(own) for bag, own in zip(alone, ids, strict=True)], 1)
    assert torch.equal(made, expected)
    ragged = together(ids.flatten(), torch.arange(0, 450, 3))
    assert torch.equal(ragged, expected)
    assert [tuple(part.shape) for part in together.split(made).values()] == [
        (50, 32), (50, 16), (50, 24),
    ]  # fmt: skip
    made.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(shared.array.grad, apart.array.grad)
    rows = torch.tensor([5, 999])
    assert torch.equal(together.materialize("user", rows), alone[2].materialize(rows))
    with pytest.raises(UnknownNameError, match="film"):
        together.materialize("flim", rows)


def test_checkpoints_store_every_row_and_refuse_other_hashes() -> None:
    embedding = ss.nn.ROBEEmbedding(100, 16, pool(seed=4))
    saved = io.BytesIO()
    torch.save(embedding.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    other = ss.nn.ROBEEmbedding(100, 16, pool(seed=4))
    with torch.no_grad():
        other.pool.array.zero_()
    other.load_state_dict(state)
    assert torch.equal(other.to_dense(), embedding.to_dense())
    for settings in ({"seed": 5}, {"seed": 4, "sign": False}, {"seed": 4, "block": 8}):
        with pytest.raises(InvalidArgumentError, match=r"^state_dict: "):
            ss.nn.ROBEEmbedding(100, 16, pool(**settings)).load_state_dict(state)


def test_copies_and_compiled_modules_look_up_the_same_rows() -> None:
    bag = ss.nn.ROBEEmbeddingBag(100, 32, pool(), mode="sum")
    ids = torch.randint(0, 100, (8, 5))
    assert torch.equal(copy.deepcopy(bag)(ids), bag(ids))
    compiled = torch.compile(bag, backend="aot_eager", fullgraph=True)
    made = compiled(ids)
    assert torch.equal(made, bag(ids))
    assert torch.equal(torch.export.export(bag, (ids,)).module()(ids), made)
    made.sum().backward()
    found = bag.pool.array.grad.clone()
    bag.pool.array.grad = None
    bag(ids).sum().backward()
    assert torch.equal(found, bag.pool.array.grad)


def test_rows_are_distributed_like_torchs_and_differ() -> None:
    embedding = ss.nn.ROBEEmbedding(5000, 64, pool(3200, block=32))
    table = embedding.to_dense().double().numpy()
    assert abs(float(table.std()) - 1) < 0.05
    # Inner products of different rows are unbiased because of the signs.
    products = (table[:2000] * table[2000:4000]).sum(1)
    assert abs(products.mean()) < 5 * products.std() / np.sqrt(2000)


def test_training_learns_like_a_dense_table() -> None:
    torch.manual_seed(1)
    target = torch.randn(64, 4)
    embedding = ss.nn.ROBEEmbedding(64, 8, pool(256, block=8))
    head = nn.Linear(8, 4)
    optimizer = torch.optim.Adam([*embedding.parameters(), *head.parameters()], 0.02)
    ids = torch.arange(64)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (head(embedding(ids)) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.25 * losses[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 8, "block": 16}, "size: 8 numbers"),
        ({"block": 0}, "block: 0"),
        ({"block": 8.0}, "block: 8.0 is not an integer"),
        ({"size": 1e6}, "size: 1000000.0 is not"),
        ({"grad_scale": float("nan")}, "grad_scale: nan"),
        ({"size": "12 parsecs"}, "size: '12 parsecs'"),
        ({"init_std": -1.0}, "init_std"),
        ({"seed": -1}, "seed"),
        ({"dtype": torch.int64}, "dtype"),
    ],
)
def test_invalid_arrays_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        pool(**{"size": 3000, **settings})


def test_sizes_may_be_elements_bytes_or_a_ratio() -> None:
    assert pool("1MiB").array.numel() == 2**18
    assert pool("8 kB", dtype=torch.float64).array.numel() == 1000
    tables = [(1000, 16), (500, 32)]
    assert ss.nn.SharedArray.compressing(tables, 100).array.numel() == 320
    with pytest.raises(InvalidArgumentError, match="ratio"):
        ss.nn.SharedArray.compressing(tables, 0)


def test_invalid_arguments_are_named() -> None:
    shared = pool()
    bag = ss.nn.ROBEEmbeddingBag(100, 16, shared, table_id=2)
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    for arguments, message in (
        ((ids - 2, offsets), r"^input: .* -1\b.*\bplace 0\b"),
        ((ids + 98, offsets), r"^input: .* 100\b.*\bplace 1\b"),
        ((ids, torch.tensor([0, 4])), "offsets: offset 4"),
        ((ids, torch.tensor([0, 2, 1])), "offsets: offset 1"),
        ((ids, torch.tensor([1, 2])), "offsets: the first"),
        ((ids,), "^offsets: "),
        ((ids[None], offsets), r"^offsets: .*\bdimension\b"),
        ((ids[None, None],), "input: has 3 dimensions"),
        ((ids.float(), offsets), r"input: is torch\.float32"),
        ((ids, offsets.float()), r"offsets: is torch\.float32"),
        ((ids, offsets, torch.ones(3)), r"^per_sample_weights: .*\bsum\b"),
        ((ids.to("meta"), offsets), r"^input: .*\bmeta\b"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            bag(*arguments)
    summed = ss.nn.ROBEEmbeddingBag(100, 16, shared, mode="sum")
    with pytest.raises(InvalidArgumentError, match=r"^per_sample_weights: .*[(\[]\d"):
        summed(ids, offsets, torch.ones(2))
    with pytest.raises(InvalidArgumentError, match=r"^per_sample_weights: .*float64"):
        summed(ids, offsets, torch.ones(3, dtype=torch.float64))
    for weights in (torch.tensor([1.0, 1.0, float("nan")]), torch.tensor([1.0, 1.0, -torch.inf])):
        with pytest.raises(InvalidArgumentError, match=r"^per_sample_weights: .*\b2\b"):
            summed(ids, offsets, weights)
    for make, reason in (
        (lambda: ss.nn.ROBEEmbedding(100, 16, shared, table_id=2), "^table_id: 2"),
        (lambda: ss.nn.ROBEEmbedding(100, 16, shared, table_id=-1), "table_id: -1"),
        (lambda: ss.nn.ROBEEmbedding(100, 16, shared, table_id=0.5), "table_id: 0.5"),
        (lambda: ss.nn.ROBEEmbedding(100, 16, 3000), r"^pool: .*\bint\b.*\bSharedArray\b"),
        (lambda: ss.nn.ROBEEmbedding(0, 16, shared), "num_embeddings: 0"),
        (lambda: ss.nn.ROBEEmbedding(1e3, 16, shared), "num_embeddings: 1000.0"),
        (lambda: ss.nn.ROBEEmbeddingCollection([(9, 16)], shared), "^tables: "),
        (lambda: ss.nn.ROBEEmbeddingCollection({"a": 9}, shared), "^tables: "),
        (lambda: ss.nn.ROBEEmbedding(10, 0, shared), "embedding_dim: 0"),
        (lambda: ss.nn.ROBEEmbedding(2**61, 16, shared), "exceeds 2"),
        (lambda: ss.nn.ROBEEmbedding(10, 16, shared, padding_idx=10), "padding_idx: 10"),
        (lambda: ss.nn.ROBEEmbeddingBag(10, 16, shared, mode="min"), "mode: 'min'"),
        (lambda: ss.nn.ROBEEmbeddingCollection({}, shared), "tables"),
        (lambda: bag.to_dense(0), "chunk_rows"),
    ):
        with pytest.raises(InvalidArgumentError, match=reason):
            make()
    together = ss.nn.ROBEEmbeddingCollection({"a": (9, 16), "b": (9, 16)}, shared)
    with pytest.raises(InvalidArgumentError, match=r"\b3 bags\b.*\d tables"):
        together(ids[:, None])
