"""Process groups with a limit on every wait: after a failure, another group can be made."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from forked_ranks import run_ranks
from slipstream.errors import CommunicationError
from slipstream.ranks.group import ProcessGroup
from slipstream.ranks.requests import Exchange, Gather, Reduce


@pytest.mark.parametrize("leaving", [(0, 1, 2), (0, 2)])
def test_after_a_failure_the_same_ranks_can_reconnect(leaving: tuple[int, ...]) -> None:
    """Also if one keeps the old group, like a rank whose own error it was."""

    def work(rank: int) -> list[float]:
        found = []
        for turn in range(3):
            ranks = ProcessGroup(dist.group.WORLD, 20.0, 0.2, f"turn{turn}")
            sum_ = torch.full((1,), float(rank + turn))
            dist.all_reduce(sum_, group=ranks.group)
            found.append(sum_.item())
            dist.barrier()
            if rank in leaving:
                ranks.explain(RuntimeError("as if"), "a test")
                with pytest.raises(CommunicationError):
                    ranks.need_alive()
            dist.barrier()
        return found

    assert run_ranks(3, work) == [[3.0, 6.0, 9.0]] * 3


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_have_the_same_sum_and_all_data(size: int, dtype: torch.dtype) -> None:
    """Two ranks exchange and add directly, more use a ring."""

    def work(rank: int) -> tuple[list[float], list[list[int]]]:
        ranks = ProcessGroup(dist.group.WORLD, 20.0, 0.2, "exchanges")
        found: list[torch.Tensor] = []

        def exchange() -> Exchange:
            for length in (3, 0, 1):
                summed = yield Reduce(torch.full((length,), 1.5 * (rank + 1), dtype=dtype))
                found.append(summed)
            found.append((yield Gather(torch.tensor([rank, 7], dtype=torch.uint8))))
            return True

        assert ranks.exchange(exchange(), "a test")
        *sums, everybody = found
        return torch.cat(sums).tolist(), everybody.tolist()

    total = 1.5 * sum(range(1, size + 1))
    expected = [total] * 4, [[rank, 7] for rank in range(size)]
    assert run_ranks(size, work) == [expected] * size


def test_a_rank_that_failed_before_does_not_count_as_alive() -> None:
    """The second of two groups with equal ranks and name has a separate roll call."""

    def work(rank: int) -> tuple[int, ...] | None:
        for turn in range(2):
            ranks = ProcessGroup(dist.group.WORLD, 20.0, 2.0, "again")
            dist.barrier()
            if turn and rank == 1:
                time.sleep(5.0)
                return None
            found = ranks.explain(RuntimeError("as if"), "a test")
            # Halos and metrics are communicated, too.
            assert "gradients" not in str(found)
            if not turn:
                dist.barrier()
        return found.ranks

    assert run_ranks(3, work) == [(1,), None, (1,)]


def test_earlier_groups_of_only_some_ranks_do_not_interfere() -> None:
    def work(rank: int) -> list[float]:
        pair = dist.new_group([0, 1])
        found = []
        for turn in range(2):
            for parent in (pair, dist.group.WORLD) if rank < 2 else (dist.group.WORLD,):
                ranks = ProcessGroup(parent, 10.0, 0.2, "exchanges")
                sum_ = torch.full((1,), float(rank + turn))
                dist.all_reduce(sum_, group=ranks.group)
                found.append(sum_.item())
        return found

    assert run_ranks(3, work) == [[1.0, 3.0, 3.0, 6.0], [1.0, 3.0, 3.0, 6.0], [3.0, 6.0]]
