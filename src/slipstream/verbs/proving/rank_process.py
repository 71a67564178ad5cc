"""One rank of a workload that several processes take together: what runs in its process.

The workload is built as in a process by itself, each rank from a seed of its own, and before the
first technique of the stage "distribution" is applied, `Join` makes the process one of so many:
torch's default process group, and the parameters of rank 0. From then on a technique's `apply`
finds what it would find in a script that ``torchrun`` started.
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

from slipstream.child import channel, leave
from slipstream.errors import WorkloadError
from slipstream.measure.wire import Interface, Samples, by_phase, sampled
from slipstream.ranks.launch import join
from slipstream.technique import Settings, Stage, Traits
from slipstream.techniques.distributed.exposed import (
    ExposedTimes,
    Layers,
    TellsExposed,
    step_by_step,
    typical,
    watch,
)
from slipstream.verbs.children import calls, workload_of
from slipstream.verbs.first_steps import first_steps
from slipstream.workload import BuiltWorkload, drive

# Steps that are kept from moment to moment, to be drawn, and the shortest wait among them.
_DRAWN, _SEEN_S = 4, 2e-4
_PARTS = "return (model, batch, loss, optimizer)"


@dataclass(frozen=True)
class Join(Settings):
    """Makes a process one of `ranks`: applied like a technique, before those of distribution.

    Attributes:
        store: a file that no other group uses, through which the ranks find each other.
        timeout_s: after which a collective that somebody has not joined fails.
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
            WorkloadError: a workload whose gradients nobody else could be sent, or which has
                joined another group by itself.
        """
        import torch
        import torch.distributed as dist

        if built.model is None or built.own_step:
            raise WorkloadError(
                "ranks exchange the gradients of a model; here the step is the function's own, "
                "which would not",
                remedy=_PARTS,
            )
        if not built.training:
            raise WorkloadError("ranks train together, and there is no optimizer", remedy=_PARTS)
        if built.loss is None and hasattr(built.model, "training_step"):
            raise WorkloadError(
                "a training_step is no forward pass, and what wraps a model passes on only that",
                remedy=_PARTS,
            )
        if not dist.is_initialized():
            join(self.rank, self.ranks, self.store, self.timeout_s)
        elif (dist.get_rank(), dist.get_world_size()) != (self.rank, self.ranks):
            raise WorkloadError(
                f"the function has joined a process group by itself, as {dist.get_rank()} of "
                f"{dist.get_world_size()}, and not as {self.rank} of {self.ranks}",
                remedy="leave init_process_group to slipstream, or read RANK and WORLD_SIZE",
            )
        with torch.no_grad():
            for tensor in (*built.model.parameters(), *built.model.buffers()):
                if tensor.numel():
                    dist.broadcast(tensor, 0)
        built.rank, built.ranks = self.rank, self.ranks


def digest(built: BuiltWorkload) -> str:
    """Of the trained parameters' bits: the same on replicas that agree."""
    import torch

    hasher = hashlib.blake2b(digest_size=16)
    for parameter in built.model.parameters():
        numbers = parameter.detach().contiguous().view(-1)
        hasher.update(numbers.view(torch.uint8).numpy() if numbers.numel() else b"")
    return hasher.hexdigest()


# What follows is called in the rank's process.


def trial(workload: dict[str, Any], keep_in: str, join: dict[str, Any], seed: int, steps: int
          ) -> Any:  # fmt: skip
    """The losses of the first steps from one seed, of this rank alone; infinities as text."""

    def program(built: BuiltWorkload) -> Generator[None, Any, dict[str, Any]]:
        outcome = yield from first_steps(built, steps)
        built.settle()
        return {**outcome, "digest": digest(built)}

    return _run(workload, keep_in, join, seed, program)


def serve(workload: dict[str, Any], keep_in: str, join: dict[str, Any], interface: str) -> Any:
    """Build the workload and answer every later call with some steps; never returns."""

    def program(built: BuiltWorkload) -> Generator[None, Any, Any]:
        import torch.distributed as dist

        talk = channel()
        samples = built.samples or built.samples_before
        talk.send({"result": {"samples": samples, "samples_before": built.samples_before}})
        counter = Interface(interface)
        for message in calls():
            asked = message["arguments"]
            if "every_s" in asked:
                talk.send({"result": (yield from _watched(built, interface, **asked))})
                continue
            built.settle()
            dist.barrier()
            sent = counter.sent_bytes
            for _ in range(asked["warm"]):
                yield
            # What a step leaves under way delays the next: the first is late by what comes after
            # the last.
            began = time.perf_counter_ns()
            for _ in range(asked["steps"]):
                yield
            wall = time.perf_counter_ns() - began
            built.settle()
            dist.barrier()
            sent = counter.sent_bytes - sent
            talk.send({"result": {"wall": wall, "sent": sent, "digest": digest(built)}})

    return _run(workload, keep_in, join, 0, program)


def _watched(
    built: BuiltWorkload, interface: str, steps: int, every_s: float
) -> Generator[None, Any, dict[str, Any]]:
    """Some steps in which it is noted what training waits for, and what the interface carries."""
    import torch.distributed as dist

    exposed, layers = ExposedTimes(), Layers(built.model)
    built.settle()
    dist.barrier()
    told = watch(built, exposed)
    with layers.watching():
        yield
    yield
    # From where a step begins to compute to where a later one does.
    with sampled(Interface(interface), every_s) as samples:
        stamps = [time.perf_counter()]
        for _ in range(steps):
            yield
            stamps.append(time.perf_counter())
    watch(built, None)
    built.settle()
    dist.barrier()
    return {
        "layers_s": typical(step_by_step(exposed, layers, stamps)) if told else None,
        "order": layers.order,
        "how": _chosen(built.model),
        "steps": steps,
        "step_s": statistics.fmean(b - a for a, b in itertools.pairwise(stamps)),
        "link": {
            "sent": by_phase(samples.times_s, samples.sent, stamps),
            "received": by_phase(samples.times_s, samples.received, stamps),
        },
        "drawn": _drawn(exposed, samples, stamps[: _DRAWN + 1]),
        "digest": digest(built),
    }


def _chosen(model: Any) -> str:
    """What a model that chooses between several ways trains by; empty of any other."""
    plan = getattr(model, "plan", None) if isinstance(model, TellsExposed) else None
    return "" if plan is None else str(plan.words)


def _drawn(exposed: ExposedTimes, samples: Samples, stamps: Sequence[float]) -> dict[str, Any]:
    """The first steps from moment to moment; seconds from the begin of the first of them."""
    began, ended = stamps[0], stamps[-1]
    inside = sum(moment <= ended for moment in samples.times_s) + 1
    return {
        "stamps_s": [stamp - began for stamp in stamps],
        "waits_s": [
            [one.began_s - began, one.ended_s - began]
            for one in exposed.times
            if began <= one.began_s < ended and one.ended_s - one.began_s > _SEEN_S
        ],
        "times_s": [moment - began for moment in samples.times_s[:inside]],
        "sent": samples.sent[:inside],
        "received": samples.received[:inside],
    }


def watched_steps(steps: int, every_s: float) -> Any:
    """As `some_steps`, of steps that are watched instead of timed."""
    return some_steps(0, steps)


def some_steps(warm: int, steps: int) -> Any:
    """Named by the coordinator for a sample; answered inside `serve`, never called."""
    raise WorkloadError("steps were asked for before the workload was built")


def _run(workload: dict[str, Any], keep_in: str, join: dict[str, Any], seed: int, program: Any
         ) -> Any:  # fmt: skip
    import torch

    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    recipe = workload_of(workload)
    joining = Join(**join)
    recipe = replace(recipe, techniques=(*recipe.techniques, joining))
    rank_seed = seed * joining.ranks + joining.rank
    return drive(recipe, program, leave, keep_in=Path(keep_in), seed=rank_seed)
