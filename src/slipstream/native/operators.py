"""How torch comes to know an operator of this package, on a processor and on a CUDA device."""

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
        run: what it does.
        shape: the same, of tensors without numbers.
        devices: dispatch keys it runs for.
        no_gradient: why a backward pass through it is an error; "" where it is differentiated
            elsewhere or its results are integers.
        batched: its rule for ``torch.vmap``, as of ``torch.library.register_vmap``.
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
                f"no gradient goes through slipstream::{name}: {no_gradient}",
                remedy="with torch.no_grad(), or detach its input",
            )

        torch.library.register_autograd(full, refuse, lib=_operators)
    if batched is not None:
        torch.library.register_vmap(full, batched, lib=_operators)


def profiled() -> bool:
    """Whether a profiler wants to see operators."""
    autograd: Any = torch.autograd
    return bool(autograd._profiler_enabled())


def plainly(x: torch.Tensor) -> bool:
    """Whether `x` has numbers of its own and torch does no more than run what is called.

    False for tensors that stand for others (of a device without memory, of a compiler, of
    ``vmap``), and while something traces: then only an operator is seen.
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
    """`shape`, which would give memory with anything in it for a mix of devices."""

    def checked(*arguments: Any) -> Any:
        tensors = [one for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)]
        if len({one.is_meta for one in tensors}) > 1:
            raise InvalidArgumentError(
                f"slipstream::{name}", "has tensors on device 'meta' and others that are not",
                remedy="load the whole model, or move all of it",
            )  # fmt: skip
        return shape(*arguments)

    return checked
