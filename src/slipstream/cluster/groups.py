"""Groups of devices: meshes with named axes, and the groups along them."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import InvalidArgumentError, UnknownNameError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Group:
    """Devices that take part in a collective; several rows do so simultaneously.

    Attributes:
        members: int64 [rows, ranks]; each row is one group, in order of ranks.
        shape: shape of a row, for algorithms by dimension; its product is `ranks`.
    """

    members: Ints
    shape: tuple[int, ...]

    @classmethod
    def of(cls, devices: Sequence[int] | npt.ArrayLike, shape: tuple[int, ...] = ()) -> Group:
        """Return one group of these devices.

        Raises:
            InvalidArgumentError: there are no devices, duplicates, or the shape does not fit.
        """
        members = np.atleast_2d(np.asarray(devices))
        if members.ndim != 2 or members.dtype.kind not in "iu":
            raise InvalidArgumentError("group", "is not a list of device numbers")
        members = members.astype(np.int64)
        if members.size == 0:
            raise InvalidArgumentError("group", "has no devices")
        shape = shape or (members.shape[1],)
        if math.prod(shape) != members.shape[1]:
            raise InvalidArgumentError("group", f"{members.shape[1]} ranks do not make {shape}")
        ordered = np.sort(members, axis=1)
        twice = np.argwhere(ordered[:, 1:] == ordered[:, :-1])
        if twice.size:
            row, place = twice[0]
            raise InvalidArgumentError("group", f"device {ordered[row, place]} is in it twice")
        return cls(members, tuple(shape))

    @property
    def ranks(self) -> int:
        return int(self.members.shape[1])

    @property
    def rows(self) -> int:
        return int(self.members.shape[0])

    def only(self, row: int) -> Group:
        """Return a group of a single row."""
        if not 0 <= row < self.rows:
            raise InvalidArgumentError("row", f"{row} is not a row; there are {self.rows}")
        return Group(self.members[row : row + 1], self.shape)

    @functools.cached_property
    def key(self) -> bytes:
        """Hash that is equal for equal groups."""
        digest = hashlib.blake2b(np.ascontiguousarray(self.members).tobytes(), digest_size=16)
        digest.update(repr((self.members.shape, self.shape)).encode())
        return digest.digest()


@dataclass(frozen=True, eq=False)
class Mesh:
    """Devices in a grid with named axes, the last axis fastest, as torch's `DeviceMesh`.

    Attributes:
        devices: int64, one dimension per axis.
        axes: their names.
    """

    devices: Ints
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", np.asarray(self.devices, np.int64))
        if self.devices.ndim != len(self.axes):
            raise InvalidArgumentError(
                "axes", f"has {len(self.axes)} names for {self.devices.ndim} dimensions"
            )
        if len(set(self.axes)) != len(self.axes):
            raise InvalidArgumentError("axes", "contains an axis twice")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.devices.shape

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        """Return the groups along one axis, or along several together, as rows of one group.

        Raises:
            UnknownNameError: there is no such axis.
        """
        selected = (axes,) if isinstance(axes, str) else tuple(axes)
        for axis in selected:
            if axis not in self.axes:
                raise UnknownNameError("axis", axis, self.axes)
        if len(set(selected)) != len(selected):
            raise InvalidArgumentError("axes", "contains an axis twice")
        along = [self.axes.index(axis) for axis in selected]
        moved = np.moveaxis(self.devices, along, range(-len(along), 0))
        shape = tuple(self.devices.shape[d] for d in along)
        return Group(moved.reshape(-1, math.prod(shape)), shape)

    def all(self) -> Group:
        """Return every device, as one group of the mesh's shape."""
        return Group(self.devices.reshape(1, -1), self.devices.shape)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> Mesh:
        """Convert torch's mesh; ranks become device numbers. Unnamed axes are called 0, 1, ..."""
        ranks = np.asarray(mesh.mesh.tolist(), np.int64)
        names: Any = mesh.mesh_dim_names or tuple(str(d) for d in range(ranks.ndim))
        return cls(ranks, tuple(names))

    def to_device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """Convert to torch's mesh, which needs an initialised process group with its ranks."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh(device_type, self.devices, mesh_dim_names=self.axes)
