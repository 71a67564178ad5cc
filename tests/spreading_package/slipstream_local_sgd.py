"""local_sgd: replicas that train independently and average their parameters periodically.

Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from slipstream.cluster import Collective, Group
from slipstream.graph import Editor, Graph, Role, StepPhase, insert_exchange
from slipstream.technique import Context, Quality, QualityKind, Stage, TechniqueSettings, Traits

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload, Workload


@dataclass(frozen=True)
class LocalSgd(TechniqueSettings):
    """`workers` replicas that average their parameters every `every` steps."""

    workers: int = 2
    every: int = 8

    name: ClassVar[str] = "local_sgd"
    traits: ClassVar[Traits] = Traits(
        stage=Stage.DISTRIBUTION,
        clock="wall",
        replicas="makes",
        variants=("local_sgd:every=8", "local_sgd:every=64"),
    )

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return why there is nothing to average, or None."""
        if not (graph.tasks.phase == StepPhase.OPTIMIZER).any():
            return "the step has no optimizer"
        return None

    def required_timings(self, graph: Graph) -> Sequence[Any]:
        """Return nothing: the step runs no other operator."""
        return []

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Insert a step's share of the exchange after the update."""
        assert context.cluster is not None
        memory, phase = graph.memory, graph.tasks.phase
        nbytes = float(memory.nbytes[memory.role == Role.PARAMETER].sum()) / self.every
        last = int(np.flatnonzero(phase == StepPhase.OPTIMIZER)[-1])
        edit = Editor(graph, str(self))
        insert_exchange(
            edit,
            context.cluster,
            Collective("all_reduce", nbytes, Group.of(np.arange(self.workers))),
            beside=last,
            ready=last,
            awaited=int(np.flatnonzero(phase != StepPhase.OPTIMIZER)[0]),
            lag=1,
            name="all_reduce of parameters",
        )
        edited = edit.apply(f"{self.workers} workers meet every {self.every} steps")
        return replace(
            edited,
            samples=graph.samples * self.workers,
            meta={**edited.meta, "workers": self.workers},
        )

    def apply(self, built: BuiltWorkload) -> None:
        """Average after each `every` updates."""
        import torch.distributed as dist

        steps, parameters = [0], list(built.model.parameters())

        def average(*_: object) -> None:
            steps[0] += 1
            if steps[0] % self.every == 0:
                for parameter in parameters:
                    dist.all_reduce(parameter.data)
                    parameter.data /= self.workers

        assert built.optimizer is not None
        built.optimizer.register_step_post_hook(average)

    def quality(self, graph: Graph | None = None) -> Quality:
        """Replicas diverge between two averages."""
        return Quality(QualityKind.NEEDS_TRAINING, "replicas train by themselves in between")

    def code(self, workload: Workload) -> None:
        """No edit, since processes have to be started."""
