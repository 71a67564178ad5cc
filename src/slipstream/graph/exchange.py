"""`Exchange`: a task of a graph that communicates with other ranks, and what it sends.

The graph of one rank represents all of them. `Graph.exchanges` is a table of the communications of
a step, which edits read and rewrite: see `slipstream.graph.communicate`.
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


PURPOSES = ("gradient", "parameter", "activation", "halo", "statistic", "control")
"""Kinds of data that an exchange carries."""


@dataclass(frozen=True, eq=False)
class Exchange:
    """One communication of the step.

    Attributes:
        task: the index of the task.
        ready: the task whose end releases it; -1 if unknown.
        awaited: the first task that waits for it, in this step or the next; -1 for none.
        collective: the collective operation and its group, which is never None.
        tensors: the gradients in it, in order; empty if it carries other data.
        latency_ns: the part of its duration that does not depend on the number of bytes.
        sent_bytes: bytes that the busiest rank sends.
        bottleneck: the slowest link.
        lag: 1 when `awaited` belongs to the next step.
        modules: the qualified name of the module of each of `tensors`; empty if unknown.
        purpose: what it carries, one of `PURPOSES`.
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
    purpose: str = "gradient"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exchange) and self.to_json() == other.to_json()

    @property
    def ranks(self) -> int:
        """The number of participating ranks."""
        return 1 if self.collective.group is None else self.collective.group.ranks

    def to_json(self) -> dict[str, Any]:
        """Return JSON for `from_json`."""
        group, collective = self.collective.group, self.collective
        return {
            "tasks": [self.task, self.ready, self.awaited],
            "kind": collective.kind, "nbytes": collective.nbytes, "algo": collective.algo,
            "chunks": collective.chunks, "priority": collective.priority,
            "weight": collective.weight, "servers": list(collective.servers),
            "members": None if group is None else group.members.tolist(),
            "shape": None if group is None else list(group.shape),
            "tensors": encode(self.tensors),
            "latency_ns": self.latency_ns, "sent_bytes": self.sent_bytes,
            "bottleneck": self.bottleneck, "lag": self.lag, "modules": list(self.modules),
            "purpose": self.purpose,
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Exchange:
        """Return the exchange that `to_json` encoded.

        Raises:
            KeyError, TypeError, ValueError: `value` is not an exchange.
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
            int(value["lag"]), _modules(value), _purpose(value),
        )  # fmt: skip

    def renumbered(self, number: Callable[[int], int]) -> Exchange:
        """Return the exchange with `number` applied to its tasks; -1 stays -1."""
        task, ready, awaited = (
            number(index) if index >= 0 else -1 for index in (self.task, self.ready, self.awaited)
        )
        return replace(self, task=task, ready=ready, awaited=awaited)

    def check(self, tasks: int) -> None:
        """Raise a `GraphError` if it cannot belong to a graph of `tasks` tasks."""
        if not 0 <= self.task < tasks or not all(
            -1 <= other < tasks for other in (self.ready, self.awaited)
        ):
            raise GraphError(f"an exchange refers to task {self.task} of {tasks}")


def _purpose(value: Mapping[str, Any]) -> str:
    """Return the purpose; files of older versions contain only gradients and parameters."""
    purpose = str(value.get("purpose", "gradient"))
    if purpose not in PURPOSES:
        raise ValueError(f"'{purpose}' is not one of {', '.join(PURPOSES)}")
    return purpose


def _modules(value: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the module of each tensor; empty for files of older versions."""
    modules = tuple(map(str, value.get("modules", ())))
    if modules and len(modules) != len(value["tensors"]):
        raise ValueError(f"{len(modules)} modules for {len(value['tensors'])} tensors")
    return modules
