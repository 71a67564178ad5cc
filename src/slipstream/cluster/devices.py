"""What computes: peak rates, memory, price."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from slipstream.cluster.quantity import Quantity
from slipstream.errors import InvalidArgumentError, UnknownNameError

_NUMBERS = (
    "memory_bytes", "memory_bytes_per_s", "launch_ns", "streams", "copy_engines", "price_per_hour",
    "multiprocessors", "clock_hz", "threads_each", "registers_each", "shared_bytes_each",
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A kind of device. What is not known is None, never a guess.

    Attributes:
        kind: its name, ``"h100-sxm"``.
        about: in words.
        flops: peak floating-point operations per second, by dtype.
        memory_bytes: of its own memory.
        memory_bytes_per_s: of that memory.
        launch_ns: from a host's call to a kernel's start.
        streams: how many kernels run beside each other.
        copy_engines: how many copies run beside kernels.
        price_per_hour: dollars.
        multiprocessors: of a GPU.
        clock_hz: that they run at, boosted.
        threads_each, registers_each, shared_bytes_each: what one multiprocessor holds.
    """

    kind: str
    about: str = ""
    flops: Mapping[str, Quantity] = field(default_factory=dict)
    memory_bytes: Quantity | None = None
    memory_bytes_per_s: Quantity | None = None
    launch_ns: Quantity | None = None
    streams: Quantity | None = None
    copy_engines: Quantity | None = None
    price_per_hour: Quantity | None = None
    multiprocessors: Quantity | None = None
    clock_hz: Quantity | None = None
    threads_each: Quantity | None = None
    registers_each: Quantity | None = None
    shared_bytes_each: Quantity | None = None

    @classmethod
    def read(cls, kind: str, table: Mapping[str, Any]) -> Device:
        """From a TOML table.

        Raises:
            InvalidArgumentError: a key that is not known, or a value that is not a number.
        """
        known = {"about", "flops", *_NUMBERS}
        for key in table:
            if key not in known:
                raise UnknownNameError("device setting", key, known, where=f"device {kind}")
        flops = table.get("flops", {})
        if not isinstance(flops, Mapping):
            raise InvalidArgumentError(f"{kind}.flops", "is not a table of dtypes")
        return cls(
            kind,
            str(table.get("about", "")),
            {dtype: Quantity.read(f"{kind}.flops.{dtype}", v) for dtype, v in flops.items()},
            **{key: Quantity.read(f"{kind}.{key}", table[key]) for key in _NUMBERS if key in table},
        )

    def to_toml(self) -> dict[str, Any]:
        table: dict[str, Any] = {"about": self.about}
        for key in _NUMBERS:
            number: Quantity | None = getattr(self, key)
            if number is not None:
                table[key] = number.to_toml()
        if self.flops:
            table["flops"] = {dtype: number.to_toml() for dtype, number in self.flops.items()}
        return table


@functools.cache
def device_kinds() -> Mapping[str, Device]:
    """The kinds that ship with the package (``presets/devices.toml``)."""
    text = resources.files("slipstream.cluster").joinpath("presets/devices.toml").read_text()
    return {kind: Device.read(kind, table) for kind, table in tomllib.loads(text).items()}


def device(kind: str) -> Device:
    """One shipped kind.

    Raises:
        UnknownNameError: no such kind.
    """
    kinds = device_kinds()
    if kind not in kinds:
        raise UnknownNameError("device kind", kind, kinds)
    return kinds[kind]
