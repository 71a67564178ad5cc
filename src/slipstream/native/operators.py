"""How torch comes to know an operator of this package, on a processor and on a CUDA device."""

from __future__ import annotations

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
