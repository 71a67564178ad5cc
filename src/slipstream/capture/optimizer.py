"""What a graph remembers of the optimizer: enough to make one like it."""

from __future__ import annotations

from typing import Any

_PLAIN = (bool, int, float, str, type(None))


def describe_optimizer(optimizer: Any) -> dict[str, Any] | None:
    """Class, settings and trained tensors of `optimizer` as JSON; None for inference.

    ``tensors`` has one ``[dtype, shape, strides, device]`` per parameter that has a gradient;
    settings that are not plain values (a learning rate that is a tensor) are left out. ``zeros``
    has the share of exact zeros in each tensor's gradient, to a tenth: square roots and divisions
    of zeros take several times as long as others.
    """
    if optimizer is None:
        return None
    trained = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None or p.requires_grad
    ]
    tensors = [
        [str(p.dtype).removeprefix("torch."), list(p.shape), list(p.stride()), p.device.type]
        for p in trained
    ]
    # The first group's: where groups differ in learning rate or decay they cost the same.
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    settings = {
        name: list(group[name]) if isinstance(group.get(name), tuple) else group.get(name)
        for name in optimizer.defaults
        if isinstance(group.get(name), (*_PLAIN, tuple))
    }
    return {
        "class": type(optimizer).__name__,
        "settings": settings,
        "tensors": tensors,
        "zeros": [_zeros(p.grad) for p in trained],
    }


def _zeros(gradient: Any) -> float:
    if gradient is None or gradient.is_sparse or not gradient.numel():
        return 0.0
    return round(1 - int(gradient.count_nonzero()) / int(gradient.numel()), 1)
