"""Registration of this package's operators with torch, for CPU and CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from slipstream.errors import InvalidArgumentError, SlipstreamError

_library: Any = torch.library
_operators = _library.Library("slipstream", "FRAGMENT")


def define(
    schema: str,
    run: Callable[..., Any],
    shape: Callable[..., Any],
    devices: tuple[str, ...] = ("CPU", "CUDA"),
    *,
    no_gradient: str = "",
    batched: Callable[..., Any] | None = None,
) -> None:
    """Define ``slipstream::`` `schema`.

    Args:
        run: implementation.
        shape: implementation for tensors without data.
        devices: dispatch keys of `run`.
        no_gradient: why a backward pass through it is an error; "" if it is differentiated
            elsewhere or its results are integers.
        batched: rule for ``torch.vmap``, see ``torch.library.register_vmap``.
    """
    name = schema.partition("(")[0]
    _operators.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in devices:
        _operators.impl(name, run, device)
    full = f"slipstream::{name}"
    torch.library.register_fake(full, _of_one_device(name, shape), lib=_operators)
    if no_gradient:

        def refuse(context: Any, *gradients: Any) -> Any:
            raise SlipstreamError(
                f"slipstream::{name} is not differentiable: {no_gradient}",
                remedy="call it under torch.no_grad(), or detach its input",
            )

        torch.library.register_autograd(full, refuse, lib=_operators)
    if batched is not None:
        torch.library.register_vmap(full, batched, lib=_operators)


def profiled() -> bool:
    """Whether a profiler records operators."""
    autograd: Any = torch.autograd
    return bool(autograd._profiler_enabled())


def plainly(x: torch.Tensor) -> bool:
    """Whether `x` has data and torch only executes calls.

    False for tensors without data or that represent others (of the meta device, of a compiler, of
    ``vmap``), and during tracing: only operators are visible then.
    """
    c: Any = torch._C
    return (
        type(x) is torch.Tensor
        and not x.is_meta
        and not c._get_tracing_state()
        and not c._len_torch_dispatch_stack()
        and c._functorch.peek_interpreter_stack() is None
    )


def _of_one_device(name: str, shape: Callable[..., Any]) -> Callable[..., Any]:
    """Check devices before `shape`, which would return uninitialised memory for mixed devices."""

    def checked(*arguments: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        if len({tensor.is_meta for tensor in tensors}) > 1:
            raise InvalidArgumentError(
                f"slipstream::{name}", "has some tensors on device 'meta' and others elsewhere",
                remedy="load the whole model, or move all of it",
            )  # fmt: skip
        return shape(*arguments)

    return checked
