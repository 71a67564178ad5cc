"""Embeddings on any kind of table compute the results of torch on the expanded rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.formats.codes import QuantizedTable
from slipstream.techniques.embedding.formats.hashed import HashedTable
from slipstream.techniques.embedding.formats.lowdim import LowDimTable, principal
from slipstream.techniques.embedding.modules import (
    CompressedEmbedding,
    TableEmbedding,
    TableEmbeddingBag,
)
from slipstream.techniques.embedding.weighting import relative_error

ROWS, DIM = 50, 12


def trained() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, DIM)


def tables() -> dict[str, Any]:
    weight = trained()
    narrow = LowDimTable.from_dense(weight, 5)
    return {
        "lowdim": narrow,
        "lowdim_int8": narrow.quantized(),
        "lowdim_int4": narrow.quantized(4),
        "int8": QuantizedTable.from_dense(weight, 8),
        "int4": QuantizedTable.from_dense(weight, 4),
        "hash": HashedTable(ROWS, DIM, 7),
        "hot_hash": HashedTable(ROWS, DIM, 7, hot=torch.tensor([3, 49, 0])),
    }


NAMES = list(tables())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_rows_equal_those_of_the_dense_table(name: str, kind: torch.dtype) -> None:
    module = TableEmbedding(tables()[name], padding_idx=-1)
    assert isinstance(module, CompressedEmbedding)
    written = module.to_dense(chunk_rows=7)
    assert written.shape == (ROWS, DIM)
    ids = torch.randint(0, ROWS, (4, 6), dtype=kind)
    ids[1, 2] = ROWS - 1
    expected = functional.embedding(ids, written)
    expected[ids == ROWS - 1] = 0
    torch.testing.assert_close(module(ids), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_bags_equal_those_of_torch(name: str, mode: str, last: bool) -> None:
    module = TableEmbeddingBag(tables()[name], mode, padding_idx=2, include_last_offset=last)
    written = module.to_dense()
    ids = torch.randint(0, ROWS, (40,))
    ids[5] = ids[6] = 2
    offsets = torch.tensor([0, 0, 5, 7, 21, 40] if last else [0, 0, 5, 7, 21])
    weights = torch.rand(40) if mode == "sum" else None
    how = {"mode": mode, "padding_idx": 2, "per_sample_weights": weights}
    expected = functional.embedding_bag(ids, written, offsets, include_last_offset=last, **how)
    torch.testing.assert_close(module(ids, offsets, weights), expected)
    square = ids.view(8, 5)
    weights = None if weights is None else weights.view(8, 5)
    how["per_sample_weights"] = weights
    expected = functional.embedding_bag(square, written, **how)
    torch.testing.assert_close(module(square, per_sample_weights=weights), expected)


def test_accepts_no_ids_and_no_bags() -> None:
    bag = TableEmbeddingBag(tables()["lowdim"], "sum")
    nothing = torch.empty(0, dtype=torch.int64)
    assert bag(nothing, nothing).shape == (0, DIM)
    assert not bag(nothing, torch.zeros(3, dtype=torch.int64)).any()
    assert TableEmbedding(tables()["hash"])(nothing.view(0, 4)).shape == (0, 4, DIM)


@pytest.mark.parametrize("name", ["lowdim", "hash", "hot_hash"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_gradients_are_correct(name: str, mode: str) -> None:
    bag = TableEmbeddingBag(tables()[name].double(), mode, padding_idx=1)
    ids, offsets = torch.randint(0, ROWS, (9,)), torch.tensor([0, 4, 4])
    names, values = zip(*bag.named_parameters(), strict=True)

    def run(*parameters: torch.Tensor) -> Any:
        return torch.func.functional_call(
            bag, dict(zip(names, parameters, strict=True)), (ids, offsets)
        )

    assert torch.autograd.gradcheck(run, values)


def test_the_nearest_table_of_fewer_columns() -> None:
    weight = trained() @ torch.diag(torch.linspace(3, 0.1, DIM))
    shares = torch.rand(ROWS) ** 3
    energy, _ = principal(weight, shares)
    for dim in (1, 4, DIM):
        made = TableEmbedding(LowDimTable.from_dense(weight, dim, shares)).to_dense()
        expected = float(energy[dim:].sum() / energy.sum())
        assert relative_error(weight, made, shares) == pytest.approx(expected, abs=1e-6)
    # No other directions lose less.
    torch.manual_seed(1)
    axes, _ = torch.linalg.qr(torch.randn(DIM, 4))
    other = relative_error(weight, weight @ axes @ axes.T, shares)
    assert other > float(energy[4:].sum() / energy.sum())


def test_shared_rows_are_weighted_means() -> None:
    weight, shares = trained(), torch.rand(ROWS)
    hot = torch.tensor([40, 4])
    table = HashedTable.from_dense(weight, 6, hot=hot, row_weights=shares)
    made = TableEmbedding(table).to_dense()
    torch.testing.assert_close(made[hot], weight[hot])
    place = table.places(torch.arange(ROWS))
    assert len(place.unique()) == 8
    for index in place.unique():
        own = (place == index).nonzero().flatten()
        mean = (weight[own] * shares[own, None]).sum(0) / shares[own].sum()
        torch.testing.assert_close(made[own[0]], mean)


def test_rows_of_any_size_have_codes() -> None:
    for factor in (1e-20, 1e-4, 1e20):
        weight = trained() * factor
        weight[3] = 0
        for bits in (8, 4):
            near = QuantizedTable.from_dense(weight, bits).look_up(torch.arange(ROWS))
            error = relative_error(weight, near)
            assert error < (1e-4 if bits == 8 else 0.02)
    zeros = QuantizedTable.from_dense(torch.zeros(3, 4)).look_up(torch.arange(3))
    assert not zeros.any()


def test_codes_are_accurate_to_half_a_step() -> None:
    weight = trained()
    for bits, most in ((8, 127), (4, 7)):
        table = QuantizedTable.from_dense(weight, bits)
        error = (table.look_up(torch.arange(ROWS)) - weight).abs()
        if bits == 8:
            step = weight.abs().amax(1, keepdim=True) / most
            # The scale has eleven bits: the largest code is up to a sixteenth of a step off.
            assert bool((error <= step * (0.5 + most * 2.0**-11)).all())
        assert relative_error(weight, weight + error) < (1e-4 if bits == 8 else 0.02)
        assert TableEmbedding(table).nbytes == ROWS * (DIM * bits // 8 + 2) + 4
    odd = QuantizedTable.from_dense(weight[:, :5], 4)
    assert odd.look_up(torch.arange(3)).shape == (3, 5)


def test_hashes_never_change() -> None:
    """Checkpoints depend on them: recorded once."""
    place = HashedTable(10**6, 4, 1000).places(torch.tensor([0, 1, 2, 999_999]))
    assert place.tolist() == [724, 801, 530, 468]
    assert HashedTable(10**6, 4, 1000, seed=1).places(torch.arange(8)).tolist() != place.tolist()


def test_saved_tables_are_loaded_equal() -> None:
    for name in NAMES:
        table, other = tables()[name], tables()[name]
        for parameter in other.parameters():
            parameter.data.zero_()
        other.load_state_dict(table.state_dict())
        ids = torch.arange(ROWS)
        assert torch.equal(table.widen(table.look_up(ids)), other.widen(other.look_up(ids)))
    with pytest.raises(InvalidArgumentError, match="state_dict"):
        HashedTable(ROWS, DIM, 7, seed=1).load_state_dict(HashedTable(ROWS, DIM, 7).state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_invalid_ids_are_named(name: str) -> None:
    embedding, bag = TableEmbedding(tables()[name]), TableEmbeddingBag(tables()[name])
    for wrong in (-1, ROWS):
        with pytest.raises(InvalidArgumentError, match="input"):
            embedding(torch.tensor([0, wrong]))
        with pytest.raises(InvalidArgumentError, match="input"):
            bag(torch.tensor([[0, wrong]]))
    with pytest.raises(InvalidArgumentError, match="input"):
        embedding(torch.tensor([0.5]))
    with pytest.raises(InvalidArgumentError, match="offsets"):
        bag(torch.tensor([1, 2, 3]), torch.tensor([0, 3, 1]))


def test_invalid_settings_are_named() -> None:
    weight = trained()
    cases: list[tuple[str, Any]] = [
        ("dim", lambda: LowDimTable(10, 4, 5)),
        ("dim", lambda: LowDimTable(10, 4, 0)),
        ("rows", lambda: HashedTable(10, 4, 0)),
        ("hot", lambda: HashedTable(10, 4, 2, hot=torch.tensor([10]))),
        ("hot", lambda: HashedTable(10, 4, 2, hot=torch.tensor([1, 1]))),
        ("bits", lambda: QuantizedTable.from_dense(weight, 5)),
        ("weight", lambda: QuantizedTable.from_dense(weight * torch.nan, 8)),
        ("weight", lambda: LowDimTable.from_dense(weight[0], 1)),
        ("row_weights", lambda: LowDimTable.from_dense(weight, 1, torch.ones(3))),
        ("row_weights", lambda: HashedTable.from_dense(weight, 1, row_weights=-torch.ones(ROWS))),
        ("mode", lambda: TableEmbeddingBag(tables()["hash"], "median")),
        ("padding_idx", lambda: TableEmbedding(tables()["hash"], ROWS)),
        ("chunk_rows", lambda: TableEmbedding(tables()["hash"]).to_dense(0)),
    ]
    for argument, make in cases:
        with pytest.raises(InvalidArgumentError) as caught:
            make()
        assert caught.value.argument == argument


@pytest.mark.parametrize("name", tables())
def test_traced_modules_compute_and_refuse_the_same(name: str) -> None:
    module = TableEmbeddingBag(tables()[name]).eval()
    ids = torch.tensor([[1, 2], [3, ROWS - 1]])
    exported = torch.export.export(module, (ids,)).module()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for traced in (exported, compiled):
        assert torch.equal(traced(ids), module(ids))
        for wrong in (ids + 1, ids - 2):
            with pytest.raises(RuntimeError, match=r"^input: .*num_embeddings"):
                traced(wrong)


def test_a_compiler_with_unknown_sizes_gets_plain_flags() -> None:
    # Compilations of other tests count towards the limit.
    torch.compiler.reset()
    module = TableEmbeddingBag(tables()["int8"]).eval()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for bags in (2, 3, 5):
        ids = torch.arange(2 * bags).view(bags, 2) % ROWS
        assert torch.equal(compiled(ids), module(ids))


def test_nonfinite_weights_are_refused() -> None:
    module = TableEmbeddingBag(tables()["lowdim"], mode="sum")
    with pytest.raises(InvalidArgumentError, match=r"^per_sample_weights: .*\b1\b"):
        module(torch.tensor([[1, 2]]), per_sample_weights=torch.tensor([[1.0, torch.nan]]))
