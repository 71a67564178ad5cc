"""Functions of the measure bench in child processes: samples, failures, allocations, ranks."""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from slipstream.measure.arms import time_function
from slipstream.measure.memory import memory_phase

_calls = 0
_rounds = 0


def sample(fault: str = "", at: int = 0) -> dict[str, float]:
    """Take a short sample; from the `at`-th call on it raises, hangs, exits, or changes shape."""
    global _calls
    _calls += 1
    if fault and _calls >= at:
        if fault == "raises":
            raise ValueError("the loss is not a number")
        if fault == "ends":
            os._exit(3)
        while fault == "hangs":
            time.sleep(0.01)
        return {**time_function(_short), "another": 1.0}
    return time_function(_short)


def draw_luck(spread: float) -> None:
    """Draw this process's amount of work per step from a lognormal distribution."""
    global _rounds
    _rounds = round(20_000 * math.exp(random.SystemRandom().gauss(0, spread)))


def lucky_sample() -> dict[str, float]:
    """Take a step with the amount of work that this process has drawn."""
    return time_function(lambda: sum(range(_rounds)))


def _short() -> None:
    sum(range(1000))


def allocate_in_phases(library: str, megabytes: list[int]) -> None:
    """Allocate, fill and free arrays of the given sizes, each as a phase ``P0``, ``P1``, ..."""
    make = _allocator(library)
    for number, size in enumerate(megabytes):
        with memory_phase(f"P{number}"):
            held = make(size)
            del held


def warm_allocator(library: str) -> None:
    """Import `library` and allocate once, so that only the arrays count afterwards."""
    _allocator(library)(1)


def _allocator(library: str) -> Callable[[int], object]:
    if library == "torch":
        import torch

        return lambda size: torch.ones(size * 10**6 // 4)
    import numpy as np

    return lambda size: np.ones(size * 10**6 // 8)


def environment_id(torch_flag: bool = False) -> dict[str, Any]:
    """Return the captured environment of this process, by id and facts."""
    import torch

    from slipstream.measure.environment import capture

    if torch_flag:
        torch.use_deterministic_algorithms(True)
    found = capture()
    return {"env_id": found.env_id, "facts": dict(found.facts)}


def recorded_run(path: str) -> None:
    """Run and record without end, and print each block's number."""
    from slipstream.measure.arms import CallableArm
    from slipstream.measure.records import Environment, ExperimentSettings
    from slipstream.measure.runner import Progress, RunPlan, run
    from slipstream.measure.store import Store

    def report(now: Progress) -> None:
        if now.phase == "measure":
            print(now.block, flush=True)

    with Store(path) as store:
        run(
            [CallableArm(name, rest) for name in ("a", "b")],
            ExperimentSettings("a", target_rel_width=1e-9),
            environment=Environment({}, "bench"),
            plan=RunPlan(maximum_warmup_s=0),
            sink=store.sink(),
            progress=report,
        )


def rest() -> None:
    """Sleep for five milliseconds."""
    time.sleep(0.005)


def all_reduce(elements: int) -> dict[str, float]:
    """Run an all-reduce on a rank; return its payload and the bytes on the interface."""
    import torch
    import torch.distributed as dist

    from slipstream_bench.lab import own_interface
    from slipstream_bench.payload import count_bytes

    tensor = torch.ones(elements)
    dist.all_reduce(tensor[:8].clone())  # opens the connections
    dist.barrier()
    counter = own_interface()
    with count_bytes() as traffic:
        dist.all_reduce(tensor)
    dist.barrier()
    return {"payload": traffic.sent_bytes, "wire": float(counter.sent_bytes)}


if __name__ == "__main__":
    recorded_run(sys.argv[1])
