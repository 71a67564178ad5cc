"""The "ids" statistic: look-ups as torch dispatches them, against counts by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from slipstream.capture.lookups import Lookups
from slipstream.graph import MAX_HOT_IDS, TableIds


def looked_up(model: nn.Module | None, *steps: Callable[[], Any]) -> list[TableIds]:
    with Lookups(model) as lookups:
        for step in steps:
            step()
            lookups.end_step()
    found = lookups.result()
    for table in found:
        table.check()
    return list(found)


def test_counts_of_an_embedding_match_a_count_by_hand() -> None:
    model = nn.Sequential(nn.Embedding(40, 3), nn.Linear(3, 3))
    torch.manual_seed(0)
    batches = [torch.randint(0, 40, (5, 7)) ** 2 // 40 for _ in range(3)]
    (table,) = looked_up(model, *(lambda b=b: model(b) for b in batches))
    counts = Counter(torch.cat(batches).flatten().tolist())
    order = sorted(counts, key=lambda index: (-counts[index], index))
    assert (table.table, table.rows, table.dimension) == ("model.0", 40, 3)
    assert table.nbytes == 40 * 3 * 4
    assert table.lookups == 105
    assert table.distinct == len(counts)
    assert list(table.hot_ids) == order
    assert [counts[index] for index in order] == list(table.hot_counts)
    for k, share in enumerate(table.top_share):
        assert share == pytest.approx(sum(sorted(counts.values())[::-1][: 2**k]) / 105)
        assert table.share(2**k) == pytest.approx(share)
    for k, number in enumerate(table.frequency):
        assert number == sum(2**k <= count < 2 ** (k + 1) for count in counts.values())
    for k, blocks in enumerate(table.blocks):
        each = [len({index // 2**k for index in batch.flatten().tolist()}) for batch in batches]
        assert blocks == pytest.approx(sum(each) / 3)
    assert table.blocks[-1] == 1
    assert table.bags == 0


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("last", [False, True])
def test_bags_are_measured(mode: Any, last: bool) -> None:
    bag = nn.EmbeddingBag(9, 2, mode="sum", include_last_offset=last)
    ids = torch.tensor([1, 1, 2, 3, 4, 5])
    offsets = torch.tensor([0, 3, 3, 4, 6] if last else [0, 3, 3, 4])
    with mode():
        (table,) = looked_up(bag, lambda: bag(ids, offsets))
    assert (table.table, table.lookups, table.distinct) == ("model", 6, 5)
    assert (table.bags, table.bag_ids, table.empty_bags, table.longest_bag) == (4, 6, 1, 3)
    assert table.bag_sizes == (1, 2)  # one of a single id, two of two or three


def test_a_matrix_of_ids_is_one_bag_per_row() -> None:
    bag = nn.EmbeddingBag(9, 2)
    (table,) = looked_up(bag, lambda: bag(torch.zeros(4, 5, dtype=torch.long)))
    assert (table.bags, table.bag_ids, table.bag_sizes) == (4, 20, (0, 0, 4))


def test_functions_and_plain_indexing_count_too() -> None:
    model = nn.Module()
    model.table = nn.Parameter(torch.zeros(6, 2))
    other = torch.zeros(8, 3)

    def step() -> None:
        _ = model.table[torch.tensor([1, -1])]
        model.table.index_select(0, torch.tensor([5]))
        functional.embedding(torch.tensor([7]), other)
        _ = other[torch.tensor([1])]  # a tensor that is not a parameter is plain indexing
        _ = model.table[:, torch.tensor([1])]

    own, loose = looked_up(model, step)
    assert (own.table, own.hot_ids, own.hot_counts) == ("model.table", (5, 1), (2, 1))
    assert (loose.table, loose.hot_ids) == ("a table of 8 x 3", (7,))


def test_the_stored_counts_of_a_large_table_are_bounded() -> None:
    table = nn.Embedding(100_000, 1)
    (found,) = looked_up(table, lambda: table(torch.arange(50_000)))
    assert found.distinct == 50_000
    assert found.hot_ids == tuple(range(MAX_HOT_IDS))
    assert len(found.top_share) < 20
    assert len(found.blocks) < 20
    assert found.share(25_000) == pytest.approx(0.5)
    assert found.share(50_000) == found.share(10**9) == 1.0


def test_a_table_that_a_step_skips_is_looked_up_in_the_others() -> None:
    model = nn.Sequential(nn.Embedding(4, 1))
    (found,) = looked_up(model, lambda: None, lambda: model(torch.tensor([1, 2])), lambda: None)
    assert found.lookups == 2
    assert found.blocks[0] == pytest.approx(2 / 2)  # over the steps since it was first seen
