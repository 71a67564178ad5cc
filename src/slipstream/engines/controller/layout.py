"""Layouts of logical tensors on the devices of a slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.errors import InvalidArgumentError

Shape = tuple[int, ...]
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Sharding:
    """Layout of a logical tensor on the devices of a slice.

    Attributes:
        kind: ``"shard"``: equal parts along `dim`; ``"replicated"``: a copy per device;
            ``"partial"``: a summand per device.
        dim: split dimension; 0 for the other kinds.
    """

    kind: Literal["shard", "replicated", "partial"]
    dim: int = 0

    def __str__(self) -> str:
        return f"sharded({self.dim})" if self.kind == "shard" else self.kind

    def shard_shape(self, shape: Shape, devices: int, what: str) -> Shape:
        """Return the shape of one device's part of a tensor with `shape`.

        Args:
            what: the tensor, for errors.

        Raises:
            InvalidArgumentError: the tensor cannot be split equally.
        """
        if self.kind != "shard":
            return shape
        if not 0 <= self.dim < len(shape) or shape[self.dim] % devices:
            remedy = f"use a size that is a multiple of {devices}, another dimension or REPLICATED"
            raise InvalidArgumentError(
                "sharding",
                f"{what} of shape {list(shape)} cannot be split along dimension {self.dim} into "
                f"{devices} equal parts",
                remedy=remedy,
            )
        part = shape[self.dim] // devices
        return (*shape[: self.dim], part, *shape[self.dim + 1 :])

    def full_shape(self, shard: Shape, devices: int, what: str) -> Shape:
        """Return the shape of a tensor from that of one device's part.

        Raises:
            InvalidArgumentError: the part does not have the split dimension.
        """
        if self.kind != "shard":
            return shard
        if not 0 <= self.dim < len(shard):
            raise InvalidArgumentError(
                "sharding", f"{what} of shape {list(shard)} has no dimension {self.dim}",
                remedy="declare a dimension that the result of the function has",
            )  # fmt: skip
        return (*shard[: self.dim], shard[self.dim] * devices, *shard[self.dim + 1 :])

    def box(self, shape: Shape, devices: int, device: int) -> Box:
        """Return a device's part of a tensor, as slices."""
        box = [slice(0, size) for size in shape]
        if self.kind == "shard":
            part = shape[self.dim] // devices
            box[self.dim] = slice(device * part, (device + 1) * part)
        return tuple(box)


REPLICATED = Sharding("replicated")
PARTIAL = Sharding("partial")


def sharded(dim: int = 0) -> Sharding:
    """Return the layout with equal parts along dimension `dim`, which is not negative."""
    return Sharding("shard", dim)


@dataclass(frozen=True)
class Piece:
    """Part of a tensor that one device sends to another.

    Attributes:
        source, target: index of the device in its slice.
        box: the part, in coordinates of the whole tensor.
    """

    source: int
    target: int
    box: Box


def pieces(
    shape: Shape, source: Sharding, hosts: Sequence[int], target: Sharding, onto: Sequence[int]
) -> Iterator[Piece]:
    """Yield what devices send to turn one layout into another; none of them is partial.

    Args:
        hosts: host of each device of the source slice.
        onto: host of each device of the target slice.
    """
    local: dict[int, int] = {}
    for device, host in enumerate(hosts):
        local.setdefault(host, device)
    for device, host in enumerate(onto):
        box = target.box(shape, len(onto), device)
        if source.kind == "replicated":
            yield Piece(local.get(host, device % len(hosts)), device, box)
            continue
        along, part = box[source.dim], shape[source.dim] // len(hosts)
        for other in range(along.start // part, -(-along.stop // part)):
            cut = slice(max(along.start, other * part), min(along.stop, (other + 1) * part))
            yield Piece(other, device, (*box[: source.dim], cut, *box[source.dim + 1 :]))
