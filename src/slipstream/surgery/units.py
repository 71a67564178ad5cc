"""Take units out of a chain of layers, and put what they did into those that stay.

A unit is an output of a linear layer or a channel of a convolution, looked at behind what follows
it element by element (norm, activation, pooling). If its value is a sum of kept units' values and a
constant, for every input, the next layer can take it from those, and nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import WorkloadError

_BETWEEN = (
    "ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "LeakyReLU", "Dropout", "Dropout2d", "Identity",
    "MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "Flatten", "BatchNorm1d", "BatchNorm2d",
)  # fmt: skip


@dataclass(frozen=True)
class Units:
    """The units of one layer.

    Attributes:
        name: of the layer in the model.
        layer, following: the layer, and the next that reads its units.
        between: modules from the one to the other.
        probe: the last of those that the units come out of as values of their own.
    """

    name: str
    layer: Any
    following: Any
    between: tuple[Any, ...]
    probe: Any

    @property
    def count(self) -> int:
        """How many."""
        return int(self.layer.weight.shape[0])


def chain_units(model: Any) -> list[Units]:
    """Of an ``nn.Sequential`` every layer whose units only the next one reads.

    Raises:
        WorkloadError: another kind of model, or a module in it of which this cannot be told.
    """
    from torch import nn

    if type(model) is not nn.Sequential:
        raise WorkloadError(
            f"units are taken out of an nn.Sequential, not of a {type(model).__name__}",
            remedy="give its parts that are one, layer by layer",
        )
    found: list[Units] = []
    name, layer = "", None
    between: list[Any] = []
    for key, module in model.named_children():
        if type(module) in (nn.Linear, nn.Conv2d):
            if (
                layer is not None
                and getattr(layer, "groups", 1) == getattr(module, "groups", 1) == 1
            ):
                flatten = next((i for i, m in enumerate(between) if type(m) is nn.Flatten), None)
                before = between if flatten is None else between[:flatten]
                probe = before[-1] if before else layer
                found.append(Units(name, layer, module, tuple(between), probe))
            name, layer, between = key, module, []
        elif type(module).__name__ in _BETWEEN:
            between.append(module)
        else:
            raise WorkloadError(
                f"what {type(module).__name__} does to units cannot be told", where=key
            )
    return found


def remove_units(units: Units, kept: Sequence[int], matrix: Any, constant: Any) -> None:
    """Keep some units and let the next layer make the others of them, in place.

    Args:
        kept: indices, rising.
        matrix: [removed, kept], what each removed unit is of the kept ones.
        constant: [removed], what is added to that.
    """
    import torch

    layer, following, count = units.layer, units.following, units.count
    stay = torch.as_tensor(kept, dtype=torch.long)
    gone = torch.tensor([i for i in range(count) if i not in set(stay.tolist())], dtype=torch.long)
    with torch.no_grad():
        weight = following.weight.detach()
        # Behind a Flatten each channel is several inputs.
        blocks = weight.reshape(weight.shape[0], count, -1)
        moved = torch.einsum("ogp,gk->okp", blocks[:, gone], matrix.to(weight.dtype))
        added = torch.einsum("ogp,g->o", blocks[:, gone], constant.to(weight.dtype))
        made = blocks[:, stay] + moved
        if following.bias is None and bool(added.any()):
            following.bias = torch.nn.Parameter(torch.zeros_like(weight[:, 0].reshape(-1)))
        if following.bias is not None:
            following.bias += added
        shape = (weight.shape[0], -1, *weight.shape[2:])
        following.weight = torch.nn.Parameter(made.reshape(shape).contiguous())
        layer.weight = torch.nn.Parameter(layer.weight.detach()[stay].clone())
        if layer.bias is not None:
            layer.bias = torch.nn.Parameter(layer.bias.detach()[stay].clone())
        for module in units.between:
            if type(module).__name__.startswith("BatchNorm"):
                _keep_of_norm(module, stay)
    for one, name in ((layer, "out"), (following, "in")):
        kind = "features" if hasattr(one, "in_features") else "channels"
        dim = 0 if name == "out" else 1
        setattr(one, f"{name}_{kind}", int(one.weight.shape[dim]))


def _keep_of_norm(norm: Any, stay: Any) -> None:
    import torch

    for name in ("weight", "bias"):
        if getattr(norm, name) is not None:
            setattr(norm, name, torch.nn.Parameter(getattr(norm, name).detach()[stay].clone()))
    for name in ("running_mean", "running_var"):
        if getattr(norm, name) is not None:
            setattr(norm, name, getattr(norm, name)[stay].clone())
    norm.num_features = len(stay)
