"""prove: measure the workload with and without techniques, the predictions beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream import technique
from slipstream.child import channel
from slipstream.durations.durations import one_pool
from slipstream.errors import ChildError
from slipstream.measure.arms import WorkerArm
from slipstream.measure.comparison import Comparison, compare
from slipstream.measure.memory import read_status_bytes, reset_peak, resettable
from slipstream.measure.records import PredictionRecord
from slipstream.technique import Technique
from slipstream.verbs._children import DEFAULT_TIMEOUT_S, memory_limit_bytes, run_program
from slipstream.workload import Built, Workload, restore_files

BASELINE = "as it is"


class WorkloadArm(WorkerArm):
    """One side: a child in which the workload is built once and steps when it is its turn."""

    def __init__(self, name: str, workload: Workload, threads: int, keep_in: Path) -> None:
        self._keep_in = keep_in
        super().__init__(
            name,
            "slipstream.verbs._prove:serve_steps",
            "slipstream.verbs._prove:one_step",
            arguments={
                "workload": workload.to_json(), "keep_in": str(keep_in), "threads": threads,
            },
            description=f"{workload.name} {name}",
            environment=one_pool(threads),
            memory_limit_bytes=memory_limit_bytes(),
        )  # fmt: skip

    def close(self) -> None:
        """End the child and put back files its script overwrote."""
        super().close()
        restore_files(self._keep_in)


def prove(
    workload: Workload | str,
    techniques: Sequence[str | Technique],
    *,
    predictions: Mapping[str, PredictionRecord] | None = None,
    budget: str | float = "60s",
    target: float = 0.02,
    threads: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    folder: Path,
    store: Any = None,
    progress: Callable[[Any], None] | None = None,
) -> Comparison:
    """Measure `workload` as it is and with each of `techniques`, in paired interleaved steps.

    Args:
        techniques: alternatives: names in the grammar, or techniques.
        predictions: by arm (the technique's name): what was predicted.
        budget, target: stop after this time, or when the interval is narrower than this.
        folder: an empty folder for what the arms keep aside; one sub-folder an arm.
        store: a `slipstream.measure.store.Store` that keeps the run while it goes on.

    Raises:
        WorkloadError: the user's code failed.
        ArmFailedError: the baseline or every candidate failed while measuring.
    """
    if isinstance(workload, str):
        workload = Workload.parse(workload)
    recipes = {BASELINE: workload}
    for one in techniques:
        chosen = technique.parse(one) if isinstance(one, str) else (one,)
        recipes[technique.combination_name(chosen)] = workload.with_technique(*chosen)
    arms = []
    for number, (name, recipe) in enumerate(recipes.items()):
        keep_in = folder / str(number)
        keep_in.mkdir()
        arms.append(WorkloadArm(name, recipe, threads, keep_in))
    return compare(
        arms,
        metrics=("wall", "cpu", "peak_memory"),
        target=target,
        budget=budget,
        timeout=timeout_s,
        title=workload.name,
        predictions=predictions,
        store=store,
        progress=progress,
    )


# What follows runs in the child.


def serve_steps(workload: dict[str, Any], keep_in: str, threads: int) -> Any:
    """Build the workload and answer every later call with one step; never returns.

    A plain script holds the thread for good, so the calls that the coordinator sends while this
    one runs are answered from within its steps.
    """
    import torch

    if threads:
        torch.set_num_threads(threads)
    can_reset = resettable()
    resting = read_status_bytes("VmRSS") if can_reset else 0

    def program(built: Built) -> Generator[None, Any, None]:
        yield
        talk = channel()
        talk.send({"result": {"ready": True}})
        while True:
            try:
                talk.receive()
            except EOFError:
                os._exit(0)
            if can_reset:
                reset_peak()
            wall, cpu = time.perf_counter_ns(), time.process_time_ns()
            yield
            sample = {
                "wall": time.perf_counter_ns() - wall,
                "cpu": time.process_time_ns() - cpu,
            }
            if can_reset:
                sample["peak_memory"] = max(1, read_status_bytes("VmHWM") - resting)
            talk.send({"result": sample})

    return run_program(workload, keep_in, program)


def one_step() -> Any:
    """Named by the coordinator for a sample; answered inside `serve_steps`, never called."""
    raise ChildError("a step was asked for before the workload was built")
