"""ONNX Runtime computes the results of the exported model, for other batches too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import slipstream as ss
from slipstream.errors import InvalidArgumentError

ROWS, DIM = 3000, 24


def made_by(path: Path, *inputs: torch.Tensor) -> torch.Tensor:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    feeds = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return torch.from_numpy(session.run(None, feeds)[0])


def agrees(module: nn.Module, path: Path, example: torch.Tensor, other: torch.Tensor) -> None:
    module.eval()
    ss.embedding.export(module, example, path)
    for inputs in (example, other):
        with torch.no_grad():
            expected = module(inputs)
        torch.testing.assert_close(made_by(path, inputs), expected, rtol=1e-5, atol=1e-6)


def ids(*shape: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(0, rows, shape)


@pytest.mark.parametrize(("block", "sign"), [(8, True), (24, False), (64, True), (7, True)])
def test_hashed_rows_are_found_by_integers_exactly(block: int, sign: bool, tmp_path: Path) -> None:
    pool = ss.nn.SharedArray(5003, block=block, sign=sign, seed=2**40 + 5)
    module = ss.nn.ROBEEmbedding(2**40, DIM, pool, table_id=3).eval()
    path = tmp_path / "rows.onnx"
    ss.embedding.export(module, torch.arange(5), path)
    inputs = torch.tensor([0, 1, 2**31 + 7, 2**40 - 1, 77, 4096])
    assert torch.equal(made_by(path, inputs), module(inputs).detach())
    assert path.stat().st_size < 2 * pool.nbytes, "the table is not in it"


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["robe", "tt", "three of tt"])
def test_bags_with_padding(kind: str, mode: str, tmp_path: Path) -> None:
    if kind == "robe":
        module: Any = ss.nn.ROBEEmbeddingBag(
            ROWS, DIM, ss.nn.SharedArray(900, block=8), mode=mode, padding_idx=4
        )
    else:
        ranks = (3,) if kind == "tt" else (3, 5)
        module = ss.nn.TTEmbeddingBag(ROWS, DIM, ranks, mode=mode, padding_idx=4, init_std=1.0)
    other = ids(9, 6)
    other[2], other[3, :2] = 4, 4
    agrees(module, tmp_path / "bags.onnx", ids(3, 6), other)


def test_collections_of_tables(tmp_path: Path) -> None:
    pool = ss.nn.SharedArray(2000, block=16)
    module = ss.nn.ROBEEmbeddingCollection({"one": (ROWS, DIM), "two": (500, 10)}, pool)
    agrees(module, tmp_path / "tables.onnx", ids(6, 1, rows=500), ids(14, 1, rows=500))


def test_rows_of_trains_of_any_shape(tmp_path: Path) -> None:
    module = ss.nn.TTEmbedding(ROWS, DIM, (4, 6), init_std=1.0)
    agrees(module, tmp_path / "train.onnx", ids(2, 3), ids(7, 3))


class Shop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(ROWS, DIM), nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.day = nn.Embedding(7, 4)
        self.top = nn.Linear(2 * DIM + 4, 1)

    def forward(self, user: torch.Tensor, items: torch.Tensor, day: torch.Tensor) -> torch.Tensor:
        parts = [self.user(user), self.item(items), self.day(day)]
        made: torch.Tensor = self.top(torch.cat(parts, 1))
        return made


@pytest.mark.parametrize(
    "way", ["lowdim", "int8", "int4", "lowdim_int8", "lowdim_int4", "tt", "robe", "hash"]
)
def test_whole_models_with_every_method(way: str, tmp_path: Path) -> None:
    model = Shop()
    seen = {"user": 1e6 / torch.arange(1, ROWS + 1)}
    made = ss.embedding.plan(model, seen, ratio=3, methods=[way], trained=True)
    made.apply(model).eval()
    path = tmp_path / "shop.onnx"

    def batch(count: int) -> tuple[torch.Tensor, ...]:
        return ids(count), ids(count, 5), ids(count, rows=7)

    ss.embedding.export(model, batch(4), path, input_names=("user", "items", "day"))
    inputs = batch(11)
    with torch.no_grad():
        torch.testing.assert_close(made_by(path, *inputs), model(*inputs), rtol=1e-4, atol=1e-5)


def test_cached_rows_are_in_the_dense_table(tmp_path: Path) -> None:
    module = ss.nn.TTEmbedding(
        ROWS, DIM, (3, 3), init_std=1.0, cache_rows=16, cache_policy="manual"
    )
    module(ids(400) % 50)
    module.refresh()
    with torch.no_grad():
        module.hot.weight += 1
    agrees(module, tmp_path / "cached.onnx", ids(5) % 50, ids(30) % 50)


def test_unsupported_modules_are_named(tmp_path: Path) -> None:
    path = tmp_path / "none.onnx"
    pool = ss.nn.SharedArray(900, block=8)
    bag = ss.nn.ROBEEmbeddingBag(ROWS, DIM, pool, mode="sum")
    with pytest.raises(InvalidArgumentError, match="offsets"):
        ss.embedding.export(bag, (ids(6), torch.tensor([0, 3])), path)
    assert torch.is_autocast_cache_enabled(), (
        "otherwise every use of a weight is a cast under autocast"
    )
    largest = ss.nn.ROBEEmbeddingBag(ROWS, DIM, pool, mode="max")
    with pytest.raises(InvalidArgumentError, match="max"):
        ss.embedding.export(largest, ids(2, 3), path)
    double = ss.nn.TTEmbedding(ROWS, DIM, (3, 3), dtype=torch.float64)
    with pytest.raises(InvalidArgumentError, match="float64"):
        ss.embedding.export(double, ids(3), path)
    with pytest.raises(InvalidArgumentError, match="input_names"):
        ss.embedding.export(bag, ids(2, 3), path, input_names=("a", "b"))
    assert not path.exists()
    assert np.all(bag.training), "the model is unchanged"
