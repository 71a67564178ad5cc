"""Groups with a limit on every wait: what is left is left for good, and another can be made."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from team import run_ranks

from slipstream.techniques.distributed.ranks import CommunicationError, Ranks


@pytest.mark.parametrize("leaving", [(0, 1, 2), (0, 2)])
def test_after_a_failure_the_same_ranks_can_be_connected_again(leaving: tuple[int, ...]) -> None:
    """Also where one keeps the old group, as a rank does whose own error it was."""

    def work(rank: int) -> list[float]:
        found = []
        for turn in range(3):
            ranks = Ranks(dist.group.WORLD, 20.0, 0.2, f"turn{turn}")
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
