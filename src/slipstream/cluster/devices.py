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
from slipstream.schema import Readers, build


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


NUMBERS: Readers = {Quantity: lambda given, place: Quantity.read(place, given)}


def read_device(given: Any, place: str) -> Device:
    """What a cluster's file says at `place`: the name of a shipped kind, or a table of numbers.

    Raises:
        SlipstreamError: neither.
    """
    if isinstance(given, str):
        return device(given)
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(
            place, f"{given!r} is no kind of device", remedy="its name, or a table of its numbers"
        )
    return build(Device, {"kind": "device", **given}, place, "device", NUMBERS)


@functools.cache
def device_kinds() -> Mapping[str, Device]:
    """The kinds that ship with the package (``presets/devices.toml``)."""
    text = resources.files("slipstream.cluster").joinpath("presets/devices.toml").read_text()
    return {
        kind: build(Device, table, kind, "device", NUMBERS, kind=kind)
        for kind, table in tomllib.loads(text).items()
    }


def device(kind: str) -> Device:
    """One shipped kind.

    Raises:
        UnknownNameError: no such kind.
    """
    kinds = device_kinds()
    if kind not in kinds:
        raise UnknownNameError("device kind", kind, kinds)
    return kinds[kind]
