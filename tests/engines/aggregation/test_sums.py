"""Sums over datagrams: exact in every order of arrival, under faults, in trees; errors named."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from slipstream.engines.aggregation import (
    AggregationError,
    AggregationServer,
    AggregatorLostError,
    JobMember,
)
from slipstream.errors import CommunicationError, InvalidArgumentError, SlipstreamError
from slipstream.native import library
from slipstream_bench.systems.fabric.lossy import Faults, lossy

PATIENT_S = 30.0
ALL_FAULTS = Faults(lost=0.05, duplicated=0.01, delayed=0.1, marked=0.05)


@pytest.fixture(autouse=True)
def native_library(require: Callable[[str, bool, str], None]) -> None:
    require("native", library() is not None, "the native library is not built")


def on_ranks(
    world: int,
    addresses: Sequence[str] | str,
    token: str,
    work: Callable[[int, JobMember], object],
    *,
    timeout_s: float = PATIENT_S,
    mtu: int | None = None,
) -> list[object]:
    """Return the result, or the error, of `work` on every rank; a thread each."""
    results: list[object] = [None] * world

    def run(rank: int) -> None:
        own = [addresses] if isinstance(addresses, str) else [addresses[rank]]
        try:
            member = JobMember(
                own, "job", rank, world, token, silent_s=PATIENT_S, timeout_s=timeout_s, mtu=mtu,
                join_s=PATIENT_S,
            )  # fmt: skip
            try:
                results[rank] = work(rank, member)
            finally:
                member.close()
        except SlipstreamError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENT_S)
        assert not thread.is_alive(), "a sum hangs"
    return results


def vector_of(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype is torch.int32:
        return torch.randint(-(2**30), 2**30, (size,), generator=generator, dtype=dtype)
    return torch.randn(size, generator=generator, dtype=dtype) * 10.0**rank


def sum_in_order(ranks: Sequence[int], size: int, dtype: torch.dtype) -> torch.Tensor:
    total = vector_of(ranks[0], size, dtype)
    for rank in ranks[1:]:
        total += vector_of(rank, size, dtype)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("size", [1, 7, 2231, 2232, 30_001])
def test_sums_are_those_of_ranks_in_order(dtype: torch.dtype, size: int) -> None:
    def work(rank: int, member: JobMember) -> bool:
        out = torch.empty(size, dtype=dtype)
        member.sum(vector_of(rank, size, dtype), out)
        return torch.equal(out, sum_in_order(range(5), size, dtype))

    with AggregationServer() as server:
        assert on_ranks(5, server.address, server.token, work) == [True] * 5


def test_faults_change_neither_sums_nor_the_equality_of_windows() -> None:
    size, turns = 9_001, 25

    def work(rank: int, member: JobMember) -> object:
        out, windows = torch.empty(size), []
        for turn in range(turns):
            member.sum(vector_of(rank, size) + turn, out)
            expected = sum(
                (vector_of(r, size) + turn for r in range(1, 3)), vector_of(0, size) + turn
            )
            assert torch.equal(out, expected)
            windows.append(member.reports[0].windows)
        return windows

    with AggregationServer() as server, lossy(server.address, ALL_FAULTS) as proxy:
        windows = on_ranks(3, proxy, server.token, work, mtu=1500)
    assert isinstance(windows[0], list)
    assert windows[1:] == windows[:1] * 2
    assert len(set(windows[0])) == turns


def test_a_tree_of_aggregators_sums_racks_then_their_sums() -> None:
    size = 20_001

    def work(rank: int, member: JobMember) -> bool:
        out = torch.empty(size)
        for _ in range(3):
            member.sum(vector_of(rank, size), out)
        racks = [sum_in_order(rack, size, torch.float32) for rack in ((0, 1), (2, 3))]
        return torch.equal(out, racks[0] + racks[1])

    with AggregationServer() as root, lossy(root.address, Faults(0.02)) as proxy:
        below = functools.partial(AggregationServer, token=root.token, parent=proxy, members=2)
        with below() as first, below() as second:
            addresses = [first.address] * 2 + [second.address] * 2
            assert on_ranks(4, addresses, root.token, work) == [True] * 4
            assert root.counts()["summed"] > 0


def test_a_vector_may_be_split_between_aggregators() -> None:
    size = 10_001
    with AggregationServer() as first, AggregationServer(token=first.token) as second:
        done = []

        def run(rank: int) -> None:
            member = JobMember([first.address, second.address], "job", rank, 2, first.token)
            out = torch.empty(size)
            member.sum(vector_of(rank, size), out)
            done.append(torch.equal(out, sum_in_order((0, 1), size, torch.float32)))
            member.close()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENT_S)
        assert done == [True, True]
        assert first.counts()["summed"] > 0 < second.counts()["summed"]


def test_not_a_number_reaches_all_ranks() -> None:
    def work(rank: int, member: JobMember) -> object:
        out = torch.empty(3)
        member.sum(torch.tensor([1.0, float("nan") if rank else 2.0, float("inf")]), out)
        return np.array_equal(out.numpy(), [2.0, np.nan, np.inf], equal_nan=True)

    with AggregationServer() as server:
        assert on_ranks(2, server.address, server.token, work) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_different_vectors_are_an_error_on_all_ranks(dtype: torch.dtype) -> None:
    def work(rank: int, member: JobMember) -> None:
        size = 1000 + rank // 2 if dtype is torch.float32 else 1000
        kind = dtype if rank == 2 else torch.float32
        member.sum(torch.ones(size, dtype=kind), torch.empty(size, dtype=kind))

    with AggregationServer() as server:
        errors = on_ranks(3, server.address, server.token, work)
    for error in errors:
        assert isinstance(error, CommunicationError)
        assert not isinstance(error, AggregatorLostError)
        assert set(error.ranks) <= {0, 1, 2}
        assert "rank 2" in error.what or "but rank 2" in error.what


def test_a_rank_that_sends_nothing_is_named_on_the_others() -> None:
    over = threading.Barrier(3)

    def work(rank: int, member: JobMember) -> None:
        try:
            if rank != 1:
                member.sum(torch.ones(10), torch.empty(10))
        finally:
            over.wait(PATIENT_S)

    with AggregationServer() as server:
        errors = on_ranks(3, server.address, server.token, work, timeout_s=0.5)
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert isinstance(error, AggregationError)
        assert error.ranks == (1,)
        assert "'job'" in error.what


def test_a_rank_that_exits_ends_the_sums_of_others() -> None:
    def work(rank: int, member: JobMember) -> None:
        if rank == 1:
            member.close(clean=False)
        else:
            member.sum(torch.ones(10), torch.empty(10))

    with AggregationServer() as server:
        errors = on_ranks(3, server.address, server.token, work)
    for error in (errors[0], errors[2]):
        assert isinstance(error, AggregatorLostError)


def test_refusals_name_rank_job_and_remedy() -> None:
    with AggregationServer(slots=100, join_s=0.5) as server:
        with pytest.raises(AggregationError, match=r"rank 0 of job 'a': the token is wrong"):
            JobMember([server.address], "a", 0, 2, "another")
        with pytest.raises(AggregationError, match=r"rank 1 of job 'a' did not join within 0.5 s"):
            JobMember([server.address], "a", 0, 2, server.token)
        alone = JobMember([server.address], "one", 0, 1, server.token)
        with pytest.raises(AggregationError, match=r"needs 64 slots, but 36 of 100") as refused:
            JobMember([server.address], "two", 0, 1, server.token)
        assert refused.value.admission
        with pytest.raises(AggregationError, match=r"rank 0 of job 'one' has joined already"):
            JobMember([server.address], "one", 0, 1, server.token, window=2)
        alone.close()
        with pytest.raises(InvalidArgumentError, match="mtu"):
            JobMember([server.address], "a", 0, 1, server.token, mtu=100)
        address = server.address
    with pytest.raises(AggregationError, match=r"rank 0 of job 'a' cannot reach"):
        JobMember([address], "a", 0, 1, server.token)
    for listen in ("0.0.0.0:0", "[::]:0", "0:0", "0x0:0"):
        with pytest.raises(InvalidArgumentError, match="every network"):
            AggregationServer(listen)
    with pytest.raises(InvalidArgumentError, match="listen"):
        AggregationServer("4700")


def test_strangers_datagrams_change_nothing() -> None:
    import socket

    def work(rank: int, member: JobMember) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            host, _, port = server.address.rpartition(":")
            genuine = bytes.fromhex("3153504c") + bytes([1, 0, 0, 0])
            for data in (
                b"",
                b"x" * 47,
                b"y" * 900,
                genuine + b"\xff" * 800,
                genuine + bytes(8000),
            ):
                stranger.sendto(data, (host, int(port)))
        out = torch.empty(5)
        member.sum(torch.ones(5), out)
        return bool((out == 2.0).all())

    with AggregationServer() as server:
        assert on_ranks(2, server.address, server.token, work) == [True, True]
        assert server.counts()["refused"] == 10
