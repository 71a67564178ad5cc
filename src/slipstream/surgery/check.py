"""Does a changed model still compute the same? Asked of its outputs, on the user's own batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def outputs_of(model: Any, run: Callable[[], object]) -> list[Any]:
    """What each call of `model` returns while `run` runs, in eval mode and without autograd.

    Dropout is off and batch statistics are left alone, so that two runs can be compared.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    outputs: list[Any] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        kept = _plain(output)
        outputs.append(tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), kept))

    undisturbed = torch.random.fork_rng(devices=[])
    with model.register_forward_hook(keep), _evaluating(model), torch.no_grad(), undisturbed:
        torch.manual_seed(0)
        run()
    return outputs


def difference(before: Any, after: Any) -> str | None:
    """None when two outputs are equal up to rounding, else where they part, in words.

    Rounding is what another order of summation makes of a value: 1e-3 of the largest in 16 bits,
    1e-4 in float32, 1e-8 in float64.
    """
    import torch
    from torch.utils._pytree import tree_flatten

    ours, kind = tree_flatten(_plain(before))
    theirs, other = tree_flatten(_plain(after))
    if kind != other:
        return "the outputs are structured differently"
    if not any(isinstance(value, torch.Tensor) for value in ours):
        return "the model returned no tensor to compare"
    for number, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        if not isinstance(one, torch.Tensor):
            continue
        if not isinstance(two, torch.Tensor) or one.shape != two.shape:
            return f"output {number} has another shape"
        if not one.is_floating_point():
            if not torch.equal(one, two):
                return f"output {number} differs"
            continue
        tolerance = _TOLERANCE.get(str(one.dtype), 1e-3)
        finite = one[one.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 1.0
        if not torch.allclose(
            one, two, rtol=tolerance, atol=tolerance * max(scale, 1e-12), equal_nan=True
        ):
            worst = float((one - two).abs().nan_to_num(float("inf")).max())
            return f"output {number} differs by up to {worst:.3g}, at values up to {scale:.3g}"
    return None


def tensors_in(value: Any) -> list[Any]:
    """The tensors of what a model returned, in order: in tuples, dictionaries and attributes."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [one for one in tree_leaves(_plain(value)) if isinstance(one, torch.Tensor)]


def _plain(value: Any, above: tuple[int, ...] = ()) -> Any:
    """`value` with every mapping and object as a dictionary, and every sequence as a tuple.

    Models return objects of all kinds that carry their tensors as attributes. What is no data
    (modules, functions), or holds itself, is None.
    """
    import torch

    if isinstance(value, (torch.Tensor, str, bytes, bool, int, float, complex, type(None))):
        return value
    if isinstance(value, (type, torch.nn.Module)) or callable(value) or id(value) in above:
        return None
    above = (*above, id(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(one, above) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_plain(one, above) for one in value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name, None), above) for name in names}
    if hasattr(value, "__dict__"):
        return {name: _plain(one, above) for name, one in vars(value).items()}
    return value


_TOLERANCE = {"torch.float64": 1e-8, "torch.float32": 1e-4}


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """`model` in eval mode within; every module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
