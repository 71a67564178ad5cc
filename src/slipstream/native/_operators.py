"""How torch comes to know an operator of this package, on a processor and on a CUDA device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

_library: Any = torch.library
_operators = _library.Library("slipstream", "FRAGMENT")


def define(
    schema: str,
    run: Callable[..., Any],
    shape: Callable[..., Any],
    devices: tuple[str, ...] = ("CPU", "CUDA"),
) -> None:
    """Define ``slipstream::`` `schema`.

    Args:
        run: what it does.
        shape: the same, of tensors without numbers.
        devices: dispatch keys it runs for.
    """
    name = schema.partition("(")[0]
    _operators.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in devices:
        _operators.impl(name, run, device)
    torch.library.register_fake(f"slipstream::{name}", shape, lib=_operators)


@functools.cache
def triton_kernels(family: str) -> Any:
    """The module of a family's kernels for CUDA devices; None where Triton is not installed."""
    try:
        return importlib.import_module(f"slipstream.native._{family}_triton")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return None
