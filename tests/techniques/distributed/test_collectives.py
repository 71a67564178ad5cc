"""Reduce-scatter, all-gather and 2-D all-reduce between real processes."""

from __future__ import annotations

import itertools
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forked_ranks import run_ranks
from slipstream.cluster import Cluster, LinkKind
from slipstream.cluster.generators import leaf_spine
from slipstream.errors import InvalidArgumentError, UsageError, WorkloadError
from slipstream.ranks.group import ProcessGroup
from slipstream.ranks.lines import Line, best_algorithm, gather, scatter
from slipstream.ranks.wire import Wire
from slipstream.technique import parse
from slipstream.techniques.distributed import (
    CommunicationError,
    all_gather,
    reduce_scatter,
    shares,
    two_d_allreduce,
)
from slipstream.techniques.distributed.collectives import grid
from slipstream.techniques.distributed.collectives.choice import chosen, line_ns, predicted_ns
from slipstream.techniques.distributed.collectives.scatter import cut
from slipstream.workload import build_from

LENGTHS = (0, 1, 3, 1000, 10_007)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BOUNDS = dict(zip(DTYPES, (1e-6, 1e-14, 2e-3, 1e-2), strict=True))


def ours(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)


def total(size: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([ours(rank, length, dtype).double() for rank in range(size)]).sum(0)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    off = (found.double() - expected).abs().max() if found.numel() else torch.tensor(0.0)
    return bool(off <= BOUNDS[dtype] * (expected.abs().max() if expected.numel() else 1.0))


@given(st.integers(0, 10_000), st.integers(1, 50))
def test_shares_cover_everything_and_differ_by_at_most_one(numel: int, ranks: int) -> None:
    starts = shares(numel, ranks)
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    assert (starts[0], starts[-1], len(lengths)) == (0, numel, ranks)
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_shares_of_the_sum_can_be_gathered_again(size: int) -> None:
    algorithms = ["direct", "ring", "auto"] + ["halving"] * (size & (size - 1) == 0)
    cases = list(itertools.product(algorithms, LENGTHS, DTYPES[:1]))
    cases += list(itertools.product(algorithms, (1000,), DTYPES[1:]))

    def work(rank: int) -> Any:
        answers = []
        for algorithm, length, dtype in cases:
            tensor = ours(rank, length, dtype)
            original = tensor.clone()
            share = reduce_scatter(tensor, algorithm=algorithm)
            answers.append((share, all_gather(share, algorithm=algorithm)))
            assert torch.equal(tensor, original), "the argument has changed"
        return answers

    found = run_ranks(size, work)
    for number, (algorithm, length, dtype) in enumerate(cases):
        expected = total(size, length, dtype)
        together = torch.cat([result[number][0] for result in found])
        assert close(together, expected, dtype), (algorithm, length, dtype)
        for rank, piece in enumerate(found):
            begin, end = shares(length, size)[rank : rank + 2]
            assert piece[number][0].shape == (end - begin,)
            assert torch.equal(piece[number][1], together)


def test_auto_sends_small_messages_directly_and_large_ones_around_a_ring() -> None:
    assert {best_algorithm(n, 1 << 12) for n in (2, 3, 4, 16)} == {"direct"}
    assert [best_algorithm(n, 1 << 12) for n in (17, 32)] == ["ring", "halving"]
    assert {best_algorithm(n, 1 << 24) for n in (3, 4, 16, 17, 32)} == {"ring"}
    assert best_algorithm(2, 1 << 24) == best_algorithm(4, 1 << 24, half_precision=True) == "direct"
    size, length = 4, 80_000
    assert best_algorithm(size, 4 * length) == "ring"

    def work(rank: int) -> list[torch.Tensor]:
        shares = [reduce_scatter(ours(rank, length), algorithm=name) for name in ("auto", "ring")]
        return [*shares, all_gather(shares[0]), all_gather(shares[0], algorithm="direct")]

    for auto, ring, together, direct in run_ranks(size, work):
        assert torch.equal(auto, ring)
        assert torch.equal(together, direct)


def test_transfer_time_is_that_of_the_sent_bytes() -> None:
    """On equal links: (n - 1) / n of the bytes, and at least the latency of a message."""
    cluster = Cluster.load("workers=4,link=100mbit,latency=100us")
    group = cluster.all()
    for kind in ("reduce_scatter", "all_gather"):
        large, twice = (line_ns(cluster, kind, size, group) for size in (1 << 22, 1 << 23))
        assert twice - large == pytest.approx(0.75 * (1 << 22) / 12.5e6 * 1e9)
        assert large == line_ns(cluster, kind, 1 << 22, group, half_precision=True)
        assert line_ns(cluster, kind, 8.0, group) >= 100e3


def test_direct_sums_add_in_rank_order() -> None:
    size, length = 5, 997
    found = run_ranks(size, lambda rank: reduce_scatter(ours(rank, length), algorithm="direct"))
    expected = ours(0, length)
    for rank in range(1, size):
        expected = expected + ours(rank, length)
    assert torch.equal(torch.cat(found), expected)


def test_a_mean_of_16_bit_values_is_rounded_once() -> None:
    size, length = 4, 200_000
    assert best_algorithm(size, 2 * length) == "ring"
    found = run_ranks(size, lambda r: reduce_scatter(ours(r, length, torch.bfloat16), mean=True))
    rows = [ours(rank, length, torch.bfloat16).float() for rank in range(size)]
    assert torch.equal(torch.cat(found), (sum(rows[1:], rows[0]) / size).bfloat16())


@pytest.mark.parametrize("size", [3, 4])
def test_a_rank_sends_no_more_than_necessary(size: int) -> None:
    length = 1200
    algorithms = ["direct", "ring"] + ["halving"] * (size == 4)

    def work(rank: int) -> list[int]:
        sent = []
        for algorithm in algorithms:
            wire = Wire.of()
            flat = ours(rank, length)
            pieces = cut(flat, shares(length, size))
            scatter(Line.of(wire), pieces, torch.empty(length // size), algorithm, 1)
            sent.append(wire.payload_bytes)
            gather(Line.of(wire), pieces, algorithm)
            sent.append(wire.payload_bytes - sent[-1])
        return sent

    for sent in run_ranks(size, work):
        assert set(sent) == {4 * length * (size - 1) // size}


def test_tensors_of_any_strides_and_shapes_are_accepted() -> None:
    def work(rank: int) -> Any:
        table = ours(rank, 60).view(6, 10).requires_grad_()
        return (
            reduce_scatter(table.T, mean=True), reduce_scatter(table[:, ::3]),
            reduce_scatter(table.sum()), all_gather(table.T[rank : rank + 1]),
        )  # fmt: skip

    found = run_ranks(2, work)
    rows = [ours(rank, 60).view(6, 10) for rank in range(2)]
    both = [torch.cat([result[k] for result in found]) for k in range(3)]
    assert torch.equal(both[0], ((rows[0] + rows[1]) / 2).T.flatten())
    assert torch.equal(both[1], (rows[0] + rows[1])[:, ::3].flatten())
    assert both[2].item() == pytest.approx(float(rows[0].sum() + rows[1].sum()))
    assert torch.equal(found[0][3], torch.cat([rows[0].T[0], rows[1].T[1]]))


@pytest.mark.parametrize(("size", "rows"), [(4, 2), (6, 2), (6, 3), (8, 2), (3, 1), (3, 3)])
def test_two_dimensions_equal_one(size: int, rows: int) -> None:
    cases = [(length, chunks, torch.float32) for length in LENGTHS for chunks in (1, 3)]
    cases += [(1000, 2, dtype) for dtype in DTYPES[1:]]

    def work(rank: int) -> Any:
        wire = Wire.of()
        answers = []
        for length, chunks, dtype in cases:
            flat = ours(rank, length, dtype)
            before = wire.payload_bytes
            grid.all_reduce(flat, wire, rows, 1, chunks)
            answers.append((flat, wire.payload_bytes - before))
        mean = ours(rank, 1000)
        grid.all_reduce(mean, wire, rows, size)
        return answers, mean

    found = run_ranks(size, work)
    for number, (length, _, dtype) in enumerate(cases):
        flat = found[0][0][number][0]
        assert close(flat, total(size, length, dtype), dtype), cases[number]
        assert all(torch.equal(result[0][number][0], flat) for result in found)
        sent = sum(result[0][number][1] for result in found)
        # All ranks together send as much as in a ring.
        assert sent == 2 * (size - 1) * length * dtype.itemsize
    assert close(found[0][1], total(size, 1000) / size, torch.float32)


def test_the_function_accepts_any_strides_and_chooses_by_the_cluster() -> None:
    racks, one_switch = two_racks(), Cluster.load("workers=4,link=1gbit")

    def work(rank: int) -> Any:
        table = ours(rank, 6000).view(60, 100)
        turned = table.clone().T
        two_d_allreduce(turned, 2, mean=True)
        plain, by_cluster = table.clone(), table.clone()
        two_d_allreduce(plain, 2, algorithm="flat")
        two_d_allreduce(by_cluster, 2, algorithm="auto", cluster=racks)
        two_d_allreduce(plain / 4, 2, algorithm="auto", cluster=one_switch)
        empty, sixteen = torch.zeros(0, 3), table.half()[:, ::7]
        two_d_allreduce(empty, 4)
        two_d_allreduce(sixteen, 1)
        with pytest.raises(InvalidArgumentError, match=r"\b3 rows\b"):
            two_d_allreduce(table, 3)
        with pytest.raises(InvalidArgumentError, match="cluster"):
            two_d_allreduce(table, 2, algorithm="auto")
        return turned, plain, by_cluster, sixteen

    found = run_ranks(4, work)
    expected = total(4, 6000).view(60, 100)
    for turned, plain, by_cluster, sixteen in found:
        assert close(turned, expected.T / 4, torch.float32)
        assert close(plain, expected, torch.float32)
        assert close(by_cluster, expected, torch.float32)
        assert close(sixteen, expected[:, ::7], torch.float16)


def two_racks() -> Cluster:
    """Two racks of two: links of 1 Gbit/s inside, one of 100 Mbit/s between."""
    inside = LinkKind.of("inside", 1e9 / 8, 20e3)
    return Cluster("racks", leaf_spine(4, 2, 1, inside, oversubscription=20.0))


def test_two_dimensions_are_chosen_only_if_faster() -> None:
    for size in (1 << 10, 1 << 22, 1 << 26):
        flat, rows = predicted_ns(two_racks(), size, 4, 2)
        assert chosen(two_racks(), size, 4, 2) == ("2d" if rows < 0.95 * flat else "flat")
        for text in ("workers=4,link=1gbit,latency=50us", "workers=4,link=20gbit,latency=20us"):
            assert chosen(Cluster.load(text), size, 4, 2) == "flat"
    assert chosen(two_racks(), 1 << 22, 4, 2) == "2d"


@pytest.mark.parametrize("sharded", [False, True])
def test_techniques_are_attached_to_a_model_in_ddp(sharded: bool) -> None:
    text = "sharded_update" if sharded else "two_d_allreduce:2"

    def built() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        return build_from((model, None, None, optimizer), (), 0, "linear")

    def trained(made: Any, rank: int) -> torch.Tensor:
        for step in range(3):
            made.optimizer.zero_grad()
            made.model(ours(10 * step + rank, 8).view(2, 4)).square().sum().backward()
            made.optimizer.step()
        return torch.cat([p.detach().flatten() for p in made.model.parameters()])

    def work(rank: int) -> Any:
        plain, made, bare = built(), built(), built()
        for workload in (plain, made):
            workload.model = DistributedDataParallel(workload.model)
        (technique,) = parse(text)
        technique.apply(made)
        with pytest.raises(WorkloadError, match=rf"^{technique.name}\b.*\bhook\b"):
            technique.apply(made)
        with pytest.raises(WorkloadError, match=rf"^{technique.name}\b.*DistributedDataParallel"):
            technique.apply(bare)
        if not sharded:
            with pytest.raises(WorkloadError, match=r"^two_d_allreduce:rows "):
                parse("two_d_allreduce")[0].apply(plain)
        change = technique.code(None)  # type: ignore[arg-type]
        assert change is not None
        assert "slipstream.distributed." in change.note
        return trained(plain, rank), trained(made, rank)

    for plain, made in run_ranks(4, work):
        assert (plain - made).abs().max() <= 1e-5


def test_differences_between_ranks_are_named_on_all_and_the_next_call_works() -> None:
    def work(rank: int) -> Any:
        messages = []
        odd = rank == 1
        for act in (
            lambda: reduce_scatter(torch.zeros(4 + odd)),
            lambda: reduce_scatter(torch.zeros((2, 3) if odd else (3, 2))),
            lambda: reduce_scatter(torch.zeros(4, dtype=torch.float64 if odd else torch.float32)),
            lambda: reduce_scatter(torch.zeros(4), mean=odd),
            lambda: (all_gather if odd else reduce_scatter)(torch.zeros(4)),
        ):
            with pytest.raises(CommunicationError) as caught:
                act()
            messages.append((str(caught.value), caught.value.ranks))
        return messages, reduce_scatter(torch.ones(3))

    for rank, (messages, after) in enumerate(run_ranks(3, work)):
        words = ("shape", "shape", "dtype", "settings", "collective")
        for (text, ranks), word in zip(messages, words, strict=True):
            assert word in text
            assert ranks == (1,), rank
        assert torch.equal(after, torch.tensor([3.0]))


def _failing(rank: int, how: str) -> Any:
    team = ProcessGroup(timeout_s=5.0, patience_s=4.0)
    team.need_same_call("start", torch.zeros(1))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        # It was idle while the others detected the error.
        store.wait([f"reported{other}" for other in (0, 2, 3)], timedelta(seconds=60))
        return None
    flat = torch.zeros(1 << 18)
    messages = []
    for _ in range(2):
        with pytest.raises(CommunicationError) as caught:
            team.run("two rows", lambda: grid.all_reduce(flat, team.wire, 2))
        messages.append((str(caught.value), caught.value.ranks))
    store.set(f"reported{rank}", "")
    return messages


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_that_ends_or_hangs_is_named_on_all(how: str) -> None:
    found = run_ranks(4, lambda rank: _failing(rank, how))
    assert found[1] is None
    for rank in (0, 2, 3):
        for text, ranks in found[rank]:
            assert ranks == (1,), text
            assert "rank 1" in text


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(UsageError, match="process group"):
        reduce_scatter(torch.zeros(4))
    with pytest.raises(InvalidArgumentError, match="numel"):
        shares(-1, 2)

    def work(rank: int) -> None:
        for tensor in (None, torch.zeros(4, dtype=torch.int32), torch.eye(3).to_sparse()):
            with pytest.raises(InvalidArgumentError, match="tensor"):
                reduce_scatter(tensor)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="algorithm"):
            reduce_scatter(torch.zeros(4), algorithm="tree")
        with pytest.raises(InvalidArgumentError, match="power of two"):
            reduce_scatter(torch.zeros(4), algorithm="halving")
        for limit in (0.0, float("nan")):
            with pytest.raises(InvalidArgumentError, match="timeout_s"):
                ProcessGroup(timeout_s=limit)
        dist.barrier()

    assert run_ranks(3, work) == [None] * 3
