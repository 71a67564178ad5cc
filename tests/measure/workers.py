"""Functions that tests of `slipstream.measure` run in worker processes."""

from __future__ import annotations

import math
import os
import random
import time
from typing import Any

from slipstream.measure import phases
from slipstream.measure.arms import time_function
from slipstream.measure.memory import memory_phase

_state: dict[str, int] = {}
_luck: dict[str, Any] = {}


def setup(work: int = 1000, fail: bool = False) -> None:
    if fail:
        raise ValueError("the model cannot be built")
    _state["work"] = work
    _state["calls"] = 0


def sample() -> dict[str, float]:
    _state["calls"] += 1
    return time_function(lambda: sum(range(_state["work"])))


def sample_with_pid() -> dict[str, float]:
    return {**sample(), "pid": os.getpid()}


def sample_phases() -> dict[str, float]:
    def step() -> None:
        with phases.phase("forward"):
            sum(range(100))

    return time_function(step)


def raises_at(call: int) -> dict[str, float]:
    found = sample()
    if _state["calls"] >= call:
        raise RuntimeError("the loss is not a number")
    return found


def hangs_at(call: int) -> dict[str, float]:
    found = sample()
    while _state["calls"] >= call:
        time.sleep(0.01)
    return found


def ends_at(call: int) -> dict[str, float]:
    found = sample()
    if _state["calls"] >= call:
        os._exit(3)
    return found


def changes_shape_at(call: int) -> dict[str, float]:
    found = sample()
    if _state["calls"] >= call:
        found["extra"] = 1.0
    return found


def not_a_sample() -> list[int]:
    return [1, 2]


def not_finite() -> dict[str, float]:
    return {"wall": float("inf")}


def fixed(wall: float) -> dict[str, float]:
    return {"wall": wall}


def allocate(megabytes: int) -> None:
    import numpy as np

    array = np.ones(megabytes * 2**20 // 8)
    del array


def allocate_in_phases(first: int, second: int) -> None:
    with memory_phase("first"):
        allocate(first)
    with memory_phase("second"):
        allocate(second)


def import_numpy() -> None:
    import numpy as np

    np.ones(1000).sum()


def draw_luck(spread: float, started: str) -> None:
    """Return this process's cost factor, drawn by its number among all started processes.

    The draw is that of its number among all that were started, which a file counts.
    """
    with open(started, "a", encoding="utf-8") as file:
        file.write("x")
    drawn = random.Random(f"process {os.path.getsize(started)}")
    _luck["factor"] = math.exp(drawn.gauss(0, spread))
    _luck["noise"] = drawn


def sample_with_luck() -> dict[str, float]:
    """Return made-up times with one per cent of noise."""
    elapsed_ns = 1e7 * _luck["factor"] * math.exp(_luck["noise"].gauss(0, 0.01))
    return {"wall": elapsed_ns, "cpu": elapsed_ns}
