"""`Exchange`: a task of a graph that communicates with other ranks, and what it sends.

The graph of one rank stands for all of them. What a step sends is `Graph.exchanges`, a table beside
the tasks that edits read and rewrite: see `slipstream.graph.communicate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import GraphError, InvalidArgumentError, UnknownNameError
from slipstream.graph.call import TensorSpec, decode, encode

if TYPE_CHECKING:
    from slipstream.cluster import Collective


@dataclass(frozen=True, eq=False)
class Exchange:
    """One communication of the step.

    Attributes:
        task: which task it is.
        ready: the task whose end releases it; -1: unknown.
        awaited: the first task that waits for it, in this step or the next; -1: none.
        collective: what is communicated, by whom; its group is never None.
        tensors: the gradients in it, in order; empty where it carries something else.
        latency_ns: of its duration, what does not depend on the bytes.
        sent_bytes: by the busiest rank.
        bottleneck: the link that takes longest.
        lag: 1 when `awaited` belongs to the next step.
        modules: of each of `tensors`: the qualified name of the module whose gradient it is; empty
            where that is not known.
    """

    task: int
    ready: int
    awaited: int
    collective: Collective
    tensors: tuple[TensorSpec, ...] = ()
    latency_ns: float = 0.0
    sent_bytes: float = 0.0
    bottleneck: str = ""
    lag: int = 0
    modules: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exchange) and self.to_json() == other.to_json()

    @property
    def ranks(self) -> int:
        """How many take part."""
        return 1 if self.collective.group is None else self.collective.group.ranks

    def to_json(self) -> dict[str, Any]:
        """JSON from which `from_json` makes an equal exchange."""
        group, one = self.collective.group, self.collective
        return {
            "tasks": [self.task, self.ready, self.awaited],
            "kind": one.kind, "nbytes": one.nbytes, "algo": one.algo, "chunks": one.chunks,
            "priority": one.priority, "weight": one.weight, "servers": list(one.servers),
            "members": None if group is None else group.members.tolist(),
            "shape": None if group is None else list(group.shape),
            "tensors": encode(self.tensors),
            "latency_ns": self.latency_ns, "sent_bytes": self.sent_bytes,
            "bottleneck": self.bottleneck, "lag": self.lag, "modules": list(self.modules),
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Exchange:
        """The exchange `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is no exchange.
        """
        from slipstream.cluster import Collective, Group

        group = None
        try:
            if value["members"] is not None:
                shape = tuple(map(int, value["shape"]))
                rows = [Group.of(row, shape).members[0] for row in value["members"]]
                group = Group(np.stack(rows), shape)
            collective = Collective(
                str(value["kind"]), float(value["nbytes"]), group, str(value["algo"]),
                int(value["chunks"]), int(value["priority"]), float(value["weight"]),
                tuple(map(int, value["servers"])),
            )  # fmt: skip
        except (InvalidArgumentError, UnknownNameError) as error:
            raise ValueError(str(error)) from error
        task, ready, awaited = map(int, value["tasks"])
        return cls(
            task, ready, awaited, collective, tuple(decode(value["tensors"])),
            float(value["latency_ns"]), float(value["sent_bytes"]), str(value["bottleneck"]),
            int(value["lag"]), _modules(value),
        )  # fmt: skip

    def renumbered(self, number: Callable[[int], int]) -> Exchange:
        """The exchange where tasks have other numbers; -1 stays -1."""
        task, ready, awaited = (
            number(one) if one >= 0 else -1 for one in (self.task, self.ready, self.awaited)
        )
        return replace(self, task=task, ready=ready, awaited=awaited)

    def check(self, tasks: int) -> None:
        """Raise a `GraphError` where it cannot belong to a graph of `tasks`."""
        if not 0 <= self.task < tasks or not all(
            -1 <= other < tasks for other in (self.ready, self.awaited)
        ):
            raise GraphError(f"an exchange names task {self.task}, of {tasks}")


def _modules(value: Mapping[str, Any]) -> tuple[str, ...]:
    """Of each tensor, its module; none in files from before they were written."""
    modules = tuple(map(str, value.get("modules", ())))
    if modules and len(modules) != len(value["tensors"]):
        raise ValueError(f"{len(modules)} modules of {len(value['tensors'])} tensors")
    return modules
