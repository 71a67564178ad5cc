"""Run one rank of a distributed workload, in its own process.

The workload is built as in a single process, with a separate seed per rank. Before the first
technique of the stage "distribution", `Join` joins torch's default process group and takes the
parameters of rank 0. A technique's `apply` then finds the state of a script that ``torchrun``
started.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import statistics
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from slipstream.child import channel, exit_with
from slipstream.errors import WorkloadError
from slipstream.measure.wire import Interface, Samples, by_phase, sampled
from slipstream.ranks.launch import join
from slipstream.technique import Stage, TechniqueSettings, Traits
from slipstream.techniques.distributed.exposed import (
    ExposedTimes,
    Layers,
    ReportsExposed,
    step_by_step,
    typical,
    watch,
)
from slipstream.verbs.children import calls, workload_of
from slipstream.verbs.first_steps import first_steps
from slipstream.workload import BuiltWorkload, drive

# Steps with a recorded time line, and the shortest wait in it.
_DRAWN_STEPS, _MIN_WAIT_S = 4, 2e-4
_PARTS = "return (model, batch, loss, optimizer)"


@dataclass(frozen=True)
class Join(TechniqueSettings):
    """Joins a group of `ranks` processes; applied like a technique, before those of distribution.

    Attributes:
        store: a file through which the ranks find each other, used by no other group.
        timeout_s: after which a collective fails if a rank has not joined it.
    """

    name: ClassVar[str] = "join"
    traits: ClassVar[Traits] = Traits(stage=Stage.DISTRIBUTION - 1)
    rank: int
    ranks: int
    store: str
    timeout_s: float

    def apply(self, built: BuiltWorkload) -> None:
        """Join the group and take the parameters of rank 0.

        Raises:
            WorkloadError: a workload that cannot exchange gradients, or that joined another group.
        """
        import torch
        import torch.distributed as dist

        if built.model is None or built.own_step:
            raise WorkloadError(
                "ranks exchange a model's gradients, but this workload has its own step function, "
                "which does not",
                remedy=_PARTS,
            )
        if not built.training:
            raise WorkloadError("ranks train, but the workload has no optimizer", remedy=_PARTS)
        if built.loss is None and hasattr(built.model, "training_step"):
            raise WorkloadError(
                "ranks need a model with a forward pass, but this one has a training_step",
                remedy=_PARTS,
            )
        if not dist.is_initialized():
            join(self.rank, self.ranks, self.store, self.timeout_s)
        elif (dist.get_rank(), dist.get_world_size()) != (self.rank, self.ranks):
            raise WorkloadError(
                f"the workload joined a process group as rank {dist.get_rank()} of "
                f"{dist.get_world_size()} instead of {self.rank} of {self.ranks}",
                remedy="leave init_process_group to slipstream, or read RANK and WORLD_SIZE",
            )
        with torch.no_grad():
            for tensor in (*built.model.parameters(), *built.model.buffers()):
                if tensor.numel():
                    dist.broadcast(tensor, 0)
        built.rank, built.ranks = self.rank, self.ranks


def digest(built: BuiltWorkload) -> str:
    """Return a hash of the parameters' bits, equal on replicas that agree."""
    import torch

    hasher = hashlib.blake2b(digest_size=16)
    for parameter in built.model.parameters():
        numbers = parameter.detach().contiguous().view(-1)
        hasher.update(numbers.view(torch.uint8).numpy() if numbers.numel() else b"")
    return hasher.hexdigest()


# The functions below are called in the rank's process.


def trial(workload: dict[str, Any], keep_in: str, join: dict[str, Any], seed: int, steps: int
          ) -> Any:  # fmt: skip
    """Return the first steps' losses of this rank from one seed; infinities as text."""

    def program(built: BuiltWorkload) -> Generator[None, Any, dict[str, Any]]:
        outcome = yield from first_steps(built, steps)
        built.settle()
        return {**outcome, "digest": digest(built)}

    return _run(workload, keep_in, join, seed, program)


def serve(workload: dict[str, Any], keep_in: str, join: dict[str, Any], interface: str) -> Any:
    """Build the workload and answer every later call with steps; never returns."""

    def program(built: BuiltWorkload) -> Generator[None, Any, Any]:
        import torch.distributed as dist

        coordinator = channel()
        samples = built.samples or built.samples_before
        coordinator.send({"result": {"samples": samples, "samples_before": built.samples_before}})
        counter = Interface(interface)
        for message in calls():
            arguments = message["arguments"]
            if "every_s" in arguments:
                coordinator.send({"result": (yield from _watched(built, interface, **arguments))})
                continue
            built.settle()
            dist.barrier()
            sent = counter.sent_bytes
            for _ in range(arguments["warm"]):
                yield
            # A step's pending work delays the next one, so the first step of the measurement is as
            # late as the work after the last.
            began = time.perf_counter_ns()
            for _ in range(arguments["steps"]):
                yield
            wall = time.perf_counter_ns() - began
            built.settle()
            dist.barrier()
            sent = counter.sent_bytes - sent
            coordinator.send({"result": {"wall": wall, "sent": sent, "digest": digest(built)}})

    return _run(workload, keep_in, join, 0, program)


def _watched(
    built: BuiltWorkload, interface: str, steps: int, every_s: float
) -> Generator[None, Any, dict[str, Any]]:
    """Run steps while recording what training waits for and the interface's traffic."""
    import torch.distributed as dist

    exposed, layers = ExposedTimes(), Layers(built.model)
    built.settle()
    dist.barrier()
    reports = watch(built, exposed)
    with layers.watching():
        yield
    yield
    # From the start of one step's computation to that of a later one.
    with sampled(Interface(interface), every_s) as samples:
        stamps = [time.perf_counter()]
        for _ in range(steps):
            yield
            stamps.append(time.perf_counter())
    watch(built, None)
    built.settle()
    dist.barrier()
    return {
        "layers_s": typical(step_by_step(exposed, layers, stamps)) if reports else None,
        "order": layers.order,
        "how": _plan_of(built.model),
        "steps": steps,
        "step_s": statistics.fmean(b - a for a, b in itertools.pairwise(stamps)),
        "link": {
            "sent": by_phase(samples.times_s, samples.sent, stamps),
            "received": by_phase(samples.times_s, samples.received, stamps),
        },
        "drawn": _drawn(exposed, samples, stamps[: _DRAWN_STEPS + 1]),
        "digest": digest(built),
    }


def _plan_of(model: Any) -> str:
    """Describe the plan that a model chose to train by; empty if it has no choice."""
    plan = getattr(model, "plan", None) if isinstance(model, ReportsExposed) else None
    return "" if plan is None else str(plan.words)


def _drawn(exposed: ExposedTimes, samples: Samples, stamps: Sequence[float]) -> dict[str, Any]:
    """Return time lines of the first steps, in seconds from the start of the first."""
    began, ended = stamps[0], stamps[-1]
    count = sum(moment <= ended for moment in samples.times_s) + 1
    return {
        "stamps_s": [stamp - began for stamp in stamps],
        "waits_s": [
            [wait.began_s - began, wait.ended_s - began]
            for wait in exposed.times
            if began <= wait.began_s < ended and wait.ended_s - wait.began_s > _MIN_WAIT_S
        ],
        "times_s": [moment - began for moment in samples.times_s[:count]],
        "sent": samples.sent[:count],
        "received": samples.received[:count],
    }


def watched_steps(steps: int, every_s: float) -> Any:
    """Counterpart of `some_steps` for steps that are watched instead of timed."""
    return some_steps(0, steps)


def some_steps(warm: int, steps: int) -> Any:
    """Name of a call that `serve` answers; never executed."""
    raise WorkloadError("steps were requested before the workload was built")


def _run(workload: dict[str, Any], keep_in: str, join: dict[str, Any], seed: int, program: Any
         ) -> Any:  # fmt: skip
    import torch

    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    recipe = workload_of(workload)
    joining = Join(**join)
    recipe = replace(recipe, techniques=(*recipe.techniques, joining))
    rank_seed = seed * joining.ranks + joining.rank
    return drive(recipe, program, exit_with, keep_in=Path(keep_in), seed=rank_seed)
