"""Replace a layer, keeping its hooks."""

from __future__ import annotations

from typing import Any

from slipstream.surgery.pairs import place

# Shared objects, so that handles of registered hooks still remove them.
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
    "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip


def why_fixed(model: Any, module: Any) -> str | None:
    """Return why the weights of a layer of `model` cannot be exchanged; None if they can."""
    parts = list(module.modules())
    parameters = {id(p): p for part in parts for p in part._parameters.values() if p is not None}
    holders = sum(id(p) in parameters for m in model.modules() for p in m._parameters.values())
    if holders > len(parameters):
        return "its weight is shared with another layer"
    for part in parts:
        for name in ("weight", *getattr(part, "_flat_weights_names", ())):
            if name not in part._parameters and hasattr(part, name):
                return "its weight is computed at every call (weight_norm, pruning, ...)"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters.values()):
        return "hooks are registered on its weight's gradient"
    return None


def exchange(model: Any, name: str, module: Any) -> None:
    """Replace the layer `name` of `model` wherever it is held; its hooks move to `module`.

    ``nn.TransformerEncoderLayer`` has an inference path that reads the dense weights of its layers;
    layers that contain a `module` of another type no longer take it.
    """
    from torch import nn

    old = model.get_submodule(name)
    for hooks in _HOOKS:
        setattr(module, hooks, getattr(old, hooks))
    place(model, name, module)
    if isinstance(module, type(old)):
        return
    for holder in model.modules():
        if isinstance(holder, nn.TransformerEncoderLayer | nn.TransformerEncoder) and any(
            child is module for child in holder.modules()
        ):
            if isinstance(holder, nn.TransformerEncoder):
                holder.use_nested_tensor = False
            else:
                holder.activation_relu_or_gelu = 0
