"""`Placement`: how a step is cut into parts, put on ranks and run in micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.cluster.groups import Mesh
from slipstream.cluster.orders import Order
from slipstream.errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive modules of a model, and the devices that run them.

    Attributes:
        name: for lanes and messages.
        modules: qualified names of the modules that begin it, in order of the forward pass; empty
            for the first part, which begins with the step.
        mesh: its devices.
        samples: per device and micro-batch.
    """

    name: str
    modules: tuple[str, ...]
    mesh: Mesh
    samples: int

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of the part, in order of the mesh."""
        return tuple(self.mesh.devices.reshape(-1).tolist())


@dataclass(frozen=True, eq=False)
class Placement:
    """Parts of a step on ranks, and the order in which each runs its micro-batches.

    With one micro-batch, which parts process one after the other, they may share devices.

    Attributes:
        parts: in order of the forward pass.
        order: a row of slots for each part.

    Raises:
        InvalidArgumentError: the order is for another number of parts, a device is in two parts of
            several micro-batches, or parts process different numbers of samples.
    """

    parts: tuple[Part, ...]
    order: Order

    def __post_init__(self) -> None:
        if len(self.parts) != self.order.stages:
            raise InvalidArgumentError(
                "order", f"it is for {self.order.stages} parts, but there are {len(self.parts)}"
            )
        owner: dict[int, Part] = {}
        for part in self.parts:
            for device in part.devices:
                if device in owner and self.order.micro_batches > 1:
                    raise InvalidArgumentError(
                        "parts", f"device {device} is in '{owner[device].name}' and '{part.name}'"
                    )
                owner[device] = part
            if self._batch(part) != self.samples or part.samples < 1:
                raise InvalidArgumentError(
                    "parts",
                    f"a step of '{part.name}' has {self._batch(part)} samples, and one of "
                    f"'{self.parts[0].name}' has {self.samples}",
                    remedy="devices x samples x micro-batches must be equal for all parts",
                )

    def _batch(self, part: Part) -> int:
        return len(part.devices) * part.samples * self.order.micro_batches

    @property
    def samples(self) -> int:
        """Samples of a step of all ranks together."""
        return self._batch(self.parts[0])

    @property
    def ranks(self) -> int:
        return len({device for part in self.parts for device in part.devices})
