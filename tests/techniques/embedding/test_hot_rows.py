"""Hot rows are counted exactly, enter unchanged, and leave with their updates."""

from __future__ import annotations

import copy
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream as ss
from environments import switch_library_off
from slipstream.techniques.embedding.hot_rows import _gains, _hashed
from slipstream.techniques.embedding.kernels import tt as door
from slipstream.techniques.embedding.kernels import tt_reference as reference

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))
from forked_ranks import run_ranks


def train(policy: str = "manual", rows: int = 16) -> ss.nn.TTEmbedding:
    torch.manual_seed(0)
    return ss.nn.TTEmbedding(1000, 16, (6, 6), init_std=1.0, cache_rows=rows, cache_policy=policy)


def skewed(count: int) -> torch.Tensor:
    return (1000 * torch.rand(count) ** 4).long()


def test_counts_are_exact_and_include_every_hot_id() -> None:
    module, seen = train(), Counter[int]()
    for _ in range(40):
        ids = skewed(500)
        module(ids)
        seen.update(ids.tolist())
    ids, counts = module.hot.counts()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == dict(seen)
    module.refresh()
    cached = set(module.hot.ids.tolist())
    least = min(seen[row] for row in cached)
    assert all(row in cached for row, often in seen.items() if often > least)


def test_hits_are_counted_separately_and_exactly() -> None:
    module, seen = train(), Counter[int]()
    for round_ in range(6):
        ids = skewed(700)
        module(ids.to(torch.int32) if round_ % 2 else ids)
        seen.update(ids.tolist())
        if round_ == 2:
            module.refresh()
            cached, counts = module.hot.counts()
            seen = Counter(dict(zip(cached.tolist(), counts.tolist(), strict=True)))
    assert int(module.hot._hits.sum()), "some look-ups were of cached rows"
    again = copy.deepcopy(module)
    for current in (module, again):
        found = dict(zip(*(part.tolist() for part in current.hot.counts()), strict=True))
        assert found == {row: often for row, often in seen.items() if often}


def test_counts_are_equal_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = _hashed(torch.tensor([5, 900, 17, 3]), 8)
    ids, made = skewed(400), []
    for _ in range(2):
        hits = torch.zeros(4, dtype=torch.int64)
        made.append((door.count_hits(hot, ids.clone(), hits), hits))
        switch_library_off(monkeypatch)
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    assert int(made[0][1].sum()) + len(made[0][0]) == 400


def test_evaluation_is_not_counted() -> None:
    module = train().eval()
    module(skewed(100))
    module.materialize(skewed(10))
    module.to_dense()
    assert not len(module.hot.counts()[0])


def test_rows_are_copied_bitwise_and_nothing_else_changes() -> None:
    module = train()
    before = module.to_dense()
    module(skewed(2000))
    changed = module.refresh()
    assert len(changed) == 16
    assert (module.hot.ids >= 0).all()
    assert torch.equal(module.to_dense(), before)


def test_cached_rows_are_trained_separately() -> None:
    module = train()
    module(skewed(2000))
    module.refresh()
    ids = module.hot.ids[:4]
    module(ids).sum().backward()
    grad = module.hot.weight.grad
    # As far as plain gradient descent would move the rows of the train.
    assert torch.equal(grad[:4], module.hot.gain[:4, None].expand(4, 16))
    assert not grad[4:].any()
    assert not any(core.grad is not None and core.grad.any() for core in module.cores)


@pytest.mark.parametrize("ranks", [(3,), (3, 4), (2, 3, 4)])
def test_the_gain_is_the_distance_that_a_step_moves_a_row_of_the_train(
    ranks: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    module = ss.nn.TTEmbedding(300, 24, ranks, init_std=2.0, dtype=torch.float64)
    cores, ids = list(module.cores), torch.tensor([0, 7, 299])
    squares = [
        sum(
            float(gradient.square().sum())
            for number in range(24)
            for gradient in torch.autograd.grad(reference.rows_of(cores, index[None])[0, number],
                                                cores)
        )
        for index in ids
    ]  # fmt: skip
    detached = [core.detach() for core in cores]
    right = torch.tensor(squares, dtype=torch.float64) / 24
    torch.testing.assert_close(_gains(detached, ids), right.clamp(min=1))
    assert bool((right > 1).all()), "otherwise only the bound would be compared"
    assert _gains([core * 1e-3 for core in detached], ids).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("policy", ["auto", "manual"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_training_with_a_cache_ends_no_worse_than_without_one(policy: str, kind: Any) -> None:
    rate = {torch.optim.SGD: 1.0, torch.optim.Adagrad: 0.05, torch.optim.Adam: 0.01}[kind]
    losses = []
    for rows in (0, 40):
        torch.manual_seed(0)
        target = torch.randn(1000, 16)
        batches = [skewed(512) for _ in range(150)]
        cached = {"cache_rows": rows, "cache_policy": policy} if rows else {}
        module = ss.nn.TTEmbedding(1000, 16, (8, 8), init_std=0.5, **cached)
        optimizer = kind(module.parameters(), lr=rate)
        for number, ids in enumerate(batches):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(module(ids), target[ids]).backward()
            optimizer.step()
            if rows and policy == "manual" and number % 25 == 10:
                module.refresh(optimizer)
        ids = torch.cat(batches)
        with torch.no_grad():
            losses.append(float(torch.nn.functional.mse_loss(module.eval()(ids), target[ids])))
    without, with_cache = losses
    assert with_cache <= without


def test_updates_of_a_row_persist_when_it_leaves() -> None:
    module = train()
    module(torch.arange(16).repeat(5))
    module.refresh()
    assert sorted(module.hot.ids.tolist()) == list(range(16))
    original = module.to_dense()
    with torch.no_grad():
        module.hot.weight += 0.3
    learned = module.to_dense()
    module(torch.arange(500, 516).repeat(9))
    module.refresh()
    assert sorted(module.hot.ids.tolist()) == list(range(500, 516))
    after = module.to_dense()
    ratio = (after - learned)[:16].norm() / (original - learned)[:16].norm()
    assert float(ratio) < 0.6
    assert torch.equal(after[500:516], learned[500:516]), "new rows are not disturbed"


def test_frequent_rows_are_disturbed_least() -> None:
    module = train()
    module(torch.arange(16).repeat(5))
    module.refresh()
    original = module.to_dense()
    with torch.no_grad():
        module.hot.weight += 0.3
    learned = module.to_dense()
    # Others are looked up more often than the leaving rows, but too seldom to enter.
    module(torch.cat([torch.arange(500, 516).repeat(900), torch.arange(600, 700).repeat(800)]))
    module.refresh()
    after = module.to_dense()
    ratio = (after - learned)[:16].norm() / (original - learned)[:16].norm()
    assert float(ratio) < 1
    assert float((after - learned)[600:700].abs().max()) < 0.05


def test_an_optimizer_resets_the_state_of_replaced_rows() -> None:
    module = train()
    optimizer = torch.optim.Adam(module.parameters())
    module(skewed(2000)).sum().backward()
    module.refresh(optimizer)
    module(module.hot.ids).square().sum().backward()
    optimizer.step()
    state = optimizer.state[module.hot.weight]["exp_avg"]
    assert state.abs().sum(1).min() > 0
    module(torch.arange(990, 1000).repeat(3000))
    changed = module.refresh(optimizer)
    assert len(changed) == 10
    assert not state[changed].any()
    assert state.any()


def test_the_automatic_policy_refreshes_only_in_training() -> None:
    module = train("auto")
    for _ in range(5):
        module(skewed(500))
    assert (module.hot.ids >= 0).all()
    quiet = train("auto").eval()
    for _ in range(5):
        quiet(skewed(500))
    assert (quiet.hot.ids < 0).all()


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_every_id_is_found_in_the_table(rows: int) -> None:
    ids = torch.randperm(10**6)[:rows] * 7919
    capacity = 1 << (2 * rows - 1).bit_length()
    table = _hashed(ids, capacity)
    requested = torch.cat([ids, ids + 1])
    expected = torch.cat([torch.arange(rows), torch.full((rows,), -1)])
    assert torch.equal(reference.slots_of(table, requested), expected)


def test_refreshing_hardly_changes_the_loss_during_training() -> None:
    torch.manual_seed(0)
    target, module = torch.randn(1000, 16), train(rows=50)
    optimizer = torch.optim.Adagrad(module.parameters(), 0.05)
    fixed, changes = skewed(4000), []

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return (module(ids) - target[ids]).square().mean()

    for _ in range(20):
        for _ in range(10):
            optimizer.zero_grad()
            loss(skewed(512)).backward()
            optimizer.step()
        with torch.no_grad():
            module.eval()
            before = float(loss(fixed))
            module.refresh(optimizer)
            changes.append(abs(float(loss(fixed)) / before - 1))
            module.train()
    assert sum(changes) / len(changes) <= 0.005


def test_processes_cache_the_same_rows_and_evict_equally() -> None:
    """Two ranks, one with twenty times the ids of the other, that refresh automatically."""

    def work(rank: int) -> list[Any]:
        module, found = train("auto", rows=4), []
        draw = torch.Generator().manual_seed(rank)
        for step in range(40):
            count = 20 if rank == 0 else 400
            ids = (50 * torch.rand(count, generator=draw) ** 4).long() + (0 if step < 20 else 500)
            module(ids)
            found.append(module.hot.ids.tolist())
        counts = module.hot.counts()
        return [*found, [int(counts[1].sum()), len(counts[0])]]

    first, other = run_ranks(2, work)
    assert first[:-1] == other[:-1]
    assert max(first[-2]) >= 500, "new hot ids replace old ones"
    changed = sum(a != b for a, b in itertools.pairwise(first[:-1]))
    assert 2 <= changed <= 25
    # 420 look-ups per step, halved at each refresh: bounded, and not multiplied by the ranks.
    assert first[-1][0] + other[-1][0] <= 2 * 420 * 20
