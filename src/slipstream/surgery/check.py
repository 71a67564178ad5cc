"""Check whether a changed model still computes the same outputs for the user's batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def outputs_of(model: Any, run: Callable[[], object]) -> list[Any]:
    """Return the output of each call of `model` during `run`, in eval mode without autograd.

    Dropout is off and batch statistics do not change, so that two runs can be compared.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    outputs: list[Any] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        plain = _plain(output)
        outputs.append(tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), plain))

    undisturbed = torch.random.fork_rng(devices=[])
    with model.register_forward_hook(keep), evaluating(model), torch.no_grad(), undisturbed:
        torch.manual_seed(0)
        run()
    return outputs


def difference(before: Any, after: Any) -> str | None:
    """Describe the first difference between two outputs; None if they are equal up to rounding.

    The tolerance for another order of summation is 1e-3 of the largest value in 16 bits, 1e-4 in
    float32, and 1e-8 in float64.
    """
    import torch
    from torch.utils._pytree import tree_flatten

    ours, kind = tree_flatten(_plain(before))
    theirs, other = tree_flatten(_plain(after))
    if kind != other:
        return "the outputs are structured differently"
    if not any(isinstance(value, torch.Tensor) for value in ours):
        return "the model returned no tensor to compare"
    for number, (expected, actual) in enumerate(zip(ours, theirs, strict=True)):
        if not isinstance(expected, torch.Tensor):
            continue
        if not isinstance(actual, torch.Tensor) or expected.shape != actual.shape:
            return f"output {number} has another shape"
        if not expected.is_floating_point():
            if not torch.equal(expected, actual):
                return f"output {number} differs"
            continue
        tolerance = _TOLERANCE.get(str(expected.dtype), 1e-3)
        finite = expected[expected.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 1.0
        if not torch.allclose(
            expected, actual, rtol=tolerance, atol=tolerance * max(scale, 1e-12), equal_nan=True
        ):
            worst = float((expected - actual).abs().nan_to_num(float("inf")).max())
            return f"output {number} differs by up to {worst:.3g}, at values up to {scale:.3g}"
    return None


def tensors_in(value: Any) -> list[Any]:
    """Return all tensors in a model's output, in order: in tuples, dictionaries and attributes."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(_plain(value)) if isinstance(leaf, torch.Tensor)]


def _plain(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Convert mappings and objects to dictionaries, and sequences to tuples.

    Models return objects of all kinds with tensors as attributes. Modules, functions and cyclic
    references become None.
    """
    import torch

    if isinstance(value, (torch.Tensor, str, bytes, bool, int, float, complex, type(None))):
        return value
    if isinstance(value, (type, torch.nn.Module)) or callable(value) or id(value) in above:
        return None
    above = (*above, id(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, above) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item, above) for item in value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name, None), above) for name in names}
    if hasattr(value, "__dict__"):
        return {name: _plain(item, above) for name, item in vars(value).items()}
    return value


_TOLERANCE = {"torch.float64": 1e-8, "torch.float32": 1e-4}


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Set evaluation mode in the block, and restore every module's mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
