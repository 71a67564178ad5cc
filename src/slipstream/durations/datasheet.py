"""The limits of a device nobody measured, from its data sheet."""

from __future__ import annotations

import re

from slipstream.cluster.devices import Device, device_kinds
from slipstream.durations.roofline import Limits
from slipstream.provenance import Provenance

# How data sheets call what torch calls otherwise.
_TORCH_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def device_named(name: str) -> Device | None:
    """The kind of device that a driver calls `name`, as in "NVIDIA A100-SXM4-40GB"; None: unknown.

    Kinds are told by their model number; memory sizes and boards of one model differ.
    """
    words = set(re.findall(r"[A-Z]+[0-9]+", name.upper()))
    for kind, device in device_kinds().items():
        if kind.partition("-")[0].upper() in words:
            return device
    return None


def datasheet_limits(device: Device) -> Limits | None:
    """What `device` can do at most, as its maker says; None where that leaves out the memory."""
    if device.memory_bytes_per_s is None:
        return None
    rates = {
        _TORCH_DTYPES[dtype]: rate.value
        for dtype, rate in device.flops.items()
        if dtype in _TORCH_DTYPES
    }
    launch = device.launch_ns.value if device.launch_ns is not None else 0.0
    return Limits(rates, device.memory_bytes_per_s.value, launch, Provenance.DATASHEET)
