"""One rank of a measurement: a process that runs communications and says how long they took.

Reads one JSON object from its standard input, writes one to its standard output. Started by
`slipstream.cluster.measuring`, on this machine or in a network namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from slipstream.cluster.measuring import COMPUTING, RANK_TIMEOUT, join
from slipstream.cluster.operations import groups_of, timed


def main() -> None:
    """Join the group, time every operation asked for, print median and all times."""
    asked = json.load(sys.stdin)
    join(asked)
    import torch
    import torch.distributed as dist

    groups: dict[tuple[int, ...], Any] = {}
    for operation in asked["operations"]:
        for ranks in groups_of(operation):
            if ranks not in groups:
                # Every rank makes every group, in one order.
                groups[ranks] = dist.new_group(list(ranks), timeout=RANK_TIMEOUT)
    rank, operations = asked["rank"], asked["operations"]
    # Who computes has no right of way.
    computed = [timed(one, rank, groups) if one["kind"] in COMPUTING else [] for one in operations]
    _go_first()
    times = [
        before or timed(one, rank, groups) for one, before in zip(operations, computed, strict=True)
    ]
    dist.barrier()
    dist.destroy_process_group()
    json.dump({"times_s": times, "torch": torch.__version__}, sys.stdout)


def _go_first() -> None:
    """Run before all who are not in as much of a hurry, where the system lets us.

    What is to be timed is the link; ranks only hand over bytes, and on busy cores each would wait
    for its turn at every piece of a ring. Their threads are there already, and ask one by one.
    """
    with contextlib.suppress(AttributeError, OSError):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


if __name__ == "__main__":
    main()
