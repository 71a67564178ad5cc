"""Remove units of layers and compensate with the remaining ones.

A unit is an output of a linear layer or a channel of a convolution that only one following layer
reads, through operations on single units (norm, activation, pooling). If its value is always a
linear combination of retained units and a constant, the following layer can compute it from those,
and the model's output stays the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import WorkloadError

_NORMS = ("BatchNorm1d", "BatchNorm2d")
# Modules, functions and tensor methods that act on each unit separately.
_BETWEEN = frozenset((
    "ReLU", "ReLU6", "GELU", "SiLU", "Tanh", "Sigmoid", "LeakyReLU", "ELU", "Hardswish", "Dropout",
    "Dropout2d", "Identity", "MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "Flatten", *_NORMS,
    "relu", "relu_", "relu6", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "hardswish",
    "dropout", "dropout2d", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d",
    "flatten",
))  # fmt: skip
_FLATTEN = ("Flatten", "flatten")


@dataclass(frozen=True)
class Units:
    """Units of one layer.

    Attributes:
        name: qualified name of the layer.
        layer, following: the layer, and the only one that reads its units.
        norms: batch norms between them.
    """

    name: str
    layer: Any
    following: Any
    norms: tuple[Any, ...]

    @property
    def count(self) -> int:
        """Number of units."""
        return int(self.layer.weight.shape[0])

    @property
    def padded(self) -> bool:
        """Whether the following layer pads its input with zeros, which are not units' values."""
        padding = getattr(self.following, "padding", 0)
        return padding == "same" or (not isinstance(padding, str) and bool(_any(padding)))

    def values(self, inputs: Any) -> Any:
        """Return the following layer's input as [samples and places, units]."""
        if hasattr(self.following, "in_features"):
            if self.following.in_features == self.count:
                return inputs.flatten(0, -2)
            return inputs.unflatten(-1, (self.count, -1)).movedim(-2, -1).flatten(0, -2)
        return inputs.movedim(1, -1).flatten(0, -2)


def _any(padding: Any) -> bool:
    return any(padding) if isinstance(padding, Sequence) else bool(padding)


def removable_units(model: Any) -> list[Units]:
    """Return every layer whose units only one other layer reads, front to back.

    Layers before branches and sums are excluded. Layers are found in ``torch.fx`` graphs of the
    model, or of its parts if tracing fails, and in the feed-forward parts of torch's Transformer
    layers.

    Raises:
        WorkloadError: no such layer was found.
    """
    units = {found.layer: found for found in _in_graphs(model)}
    if not units:
        kinds = sorted({type(m).__name__ for m in model.modules() if not list(m.children())})
        raise WorkloadError(
            f"no layer of this {type(model).__name__} has units that only one other layer reads "
            f"through supported operations; it consists of {', '.join(kinds)}",
            remedy="use a linear layer or convolution, activations, and another such layer",
        )
    order = [id(module) for module in model.modules()]
    return sorted(units.values(), key=lambda found: order.index(id(found.layer)))


def _in_graphs(model: Any) -> Iterator[Units]:
    from torch import fx, nn

    names = {module: name for name, module in model.named_modules()}
    calls: Counter[Any] = Counter()
    graphs: list[tuple[Any, Any]] = []
    open_ = [model]
    while open_:
        part = open_.pop()
        if isinstance(part, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            calls.update((part.linear1, part.linear2))
            yield Units(names[part.linear1], part.linear1, part.linear2, ())
            continue
        try:
            graph = fx.Tracer().trace(part) if list(part.children()) else None
        except Exception:  # a user's forward may not be traceable
            graph = None
        if graph is None:
            open_ += list(part.children())
            continue
        graphs.append((part, graph))
        for node in graph.nodes:
            if node.op == "call_module":
                called = part.get_submodule(node.target)
                calls[called] += 1
                if list(called.children()):
                    open_.append(called)
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    for part, graph in graphs:
        for node in graph.nodes:
            units = _from(node, part, names) if node.op == "call_module" else None
            if units is not None:
                both = units.layer, units.following
                if all(calls[layer] == 1 == owners[id(layer.weight)] for layer in both):
                    yield units


def _from(node: Any, part: Any, names: dict[Any, str]) -> Units | None:
    """Return the units of the layer called at `node`, if only one supported layer reads them."""
    from torch import nn

    layer = part.get_submodule(node.target)
    if not _is_plain(layer):
        return None
    norms: list[Any] = []
    flat = False
    while len(node.users) == 1:
        before, node = node, next(iter(node.users))
        if node.op == "call_module":
            module = part.get_submodule(node.target)
            kind = type(module).__name__
            if _is_plain(module):
                linear = isinstance(module, nn.Linear)
                inputs = module.in_features if linear else module.in_channels
                count = len(layer.weight)
                fits = inputs % count == 0 if linear and flat else inputs == count
                if isinstance(layer, nn.Linear) != linear and not flat:
                    return None
                return Units(names[layer], layer, module, tuple(norms)) if fits else None
            if kind in _NORMS:
                norms.append(module)
        elif node.op in ("call_function", "call_method"):
            kind = node.target if isinstance(node.target, str) else node.target.__name__
            if node.all_input_nodes != [before]:
                return None
        else:
            return None
        if kind not in _BETWEEN:
            return None
        if kind in _FLATTEN:
            flat = isinstance(layer, nn.Conv2d)
            if not flat:
                return None
    return None


def _is_plain(module: Any) -> bool:
    from torch import nn

    return type(module) in (nn.Linear, nn.Conv2d) and getattr(module, "groups", 1) == 1


def remove_units(units: Units, retained: Sequence[int], matrix: Any, constant: Any) -> None:
    """Remove units in place and let the following layer compute them from the retained ones.

    Args:
        retained: indices, ascending.
        matrix: [removed, retained], coefficients of each removed unit.
        constant: [removed], offset of each removed unit.
    """
    import torch

    layer, following, count = units.layer, units.following, units.count
    stay = torch.as_tensor(retained, dtype=torch.long)
    removed = torch.tensor(
        [i for i in range(count) if i not in set(stay.tolist())], dtype=torch.long
    )
    with torch.no_grad():
        weight = following.weight.detach()
        # After a Flatten, each channel is several inputs.
        blocks = weight.reshape(weight.shape[0], count, -1)
        moved = torch.einsum("ogp,gk->okp", blocks[:, removed], matrix.to(weight.dtype))
        added = torch.einsum("ogp,g->o", blocks[:, removed], constant.to(weight.dtype))
        merged = blocks[:, stay] + moved
        if following.bias is None and bool(added.any()):
            following.bias = torch.nn.Parameter(torch.zeros_like(weight[:, 0].reshape(-1)))
        if following.bias is not None:
            following.bias += added
        shape = (weight.shape[0], -1, *weight.shape[2:])
        following.weight = torch.nn.Parameter(merged.reshape(shape).contiguous())
        layer.weight = torch.nn.Parameter(layer.weight.detach()[stay].clone())
        if layer.bias is not None:
            layer.bias = torch.nn.Parameter(layer.bias.detach()[stay].clone())
        for norm in units.norms:
            _keep_of_norm(norm, stay)
    for changed, name in ((layer, "out"), (following, "in")):
        kind = "features" if hasattr(changed, "in_features") else "channels"
        dim = 0 if name == "out" else 1
        setattr(changed, f"{name}_{kind}", int(changed.weight.shape[dim]))


def _keep_of_norm(norm: Any, stay: Any) -> None:
    import torch

    for name in ("weight", "bias"):
        if getattr(norm, name) is not None:
            setattr(norm, name, torch.nn.Parameter(getattr(norm, name).detach()[stay].clone()))
    for name in ("running_mean", "running_var"):
        if getattr(norm, name) is not None:
            setattr(norm, name, getattr(norm, name)[stay].clone())
    norm.num_features = len(stay)
