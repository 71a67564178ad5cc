"""Kinds of devices: peak rates, memory, price."""

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
    """A kind of device. Unknown values are None, never guesses.

    Attributes:
        kind: its name, ``"h100-sxm"``.
        about: description.
        flops: peak floating-point operations per second, by dtype.
        memory_bytes: size of its memory.
        memory_bytes_per_s: bandwidth of its memory.
        launch_ns: time from a host's call to a kernel's start.
        streams: number of kernels that run concurrently.
        copy_engines: number of copies that run concurrently with kernels.
        price_per_hour: dollars.
        multiprocessors: number of multiprocessors of a GPU.
        clock_hz: their boost clock.
        threads_each, registers_each, shared_bytes_each: capacity of one multiprocessor.
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


NUMBERS: Readers = {Quantity: lambda value, place: Quantity.read(place, value)}


def read_device(value: Any, place: str) -> Device:
    """Read a device of a cluster's file: the name of a shipped kind, or a table of numbers.

    Raises:
        SlipstreamError: it is neither.
    """
    if isinstance(value, str):
        return device(value)
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(
            place,
            f"{value!r} is not a kind of device",
            remedy="use its name, or a table of its numbers",
        )
    return build(Device, {"kind": "device", **value}, place, "device", NUMBERS)


@functools.cache
def device_kinds() -> Mapping[str, Device]:
    """Return the kinds that ship with the package (``presets/devices.toml``)."""
    text = resources.files("slipstream.cluster").joinpath("presets/devices.toml").read_text()
    return {
        kind: build(Device, table, kind, "device", NUMBERS, kind=kind)
        for kind, table in tomllib.loads(text).items()
    }


def device(kind: str) -> Device:
    """Return a shipped kind.

    Raises:
        UnknownNameError: there is no such kind.
    """
    kinds = device_kinds()
    if kind not in kinds:
        raise UnknownNameError("device kind", kind, kinds)
    return kinds[kind]
