"""Take units out of layers, and put what they did into those that stay.

A unit is an output of a linear layer or a channel of a convolution whose values one next layer
alone reads, behind what treats each unit by itself (norm, activation, pooling). If such a value is
a sum of kept units' values and a constant, for every input, the next layer can take it from those,
and nothing changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import WorkloadError

_NORMS = ("BatchNorm1d", "BatchNorm2d")
# Modules, functions and methods of tensors that leave each unit a unit.
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
    """The units of one layer.

    Attributes:
        name: of the layer in the model.
        layer, following: the layer, and the only one that reads its units.
        norms: batch norms from the one to the other.
    """

    name: str
    layer: Any
    following: Any
    norms: tuple[Any, ...]

    @property
    def count(self) -> int:
        """How many."""
        return int(self.layer.weight.shape[0])

    @property
    def padded(self) -> bool:
        """Whether the next layer puts zeros around its input, where no unit has its value."""
        padding = getattr(self.following, "padding", 0)
        return padding == "same" or (not isinstance(padding, str) and bool(_any(padding)))

    def values(self, given: Any) -> Any:
        """What the next layer is given, as [samples and places, units]."""
        if hasattr(self.following, "in_features"):
            if self.following.in_features == self.count:
                return given.flatten(0, -2)
            return given.unflatten(-1, (self.count, -1)).movedim(-2, -1).flatten(0, -2)
        return given.movedim(1, -1).flatten(0, -2)


def _any(padding: Any) -> bool:
    return any(padding) if isinstance(padding, Sequence) else bool(padding)


def removable_units(model: Any) -> list[Units]:
    """Every layer whose units only one other reads, front to back; branches and sums stay whole.

    Found in the graph that ``torch.fx`` makes of the model, or else in those of its parts, and in
    the feed-forward halves of torch's Transformer layers.

    Raises:
        WorkloadError: there is none that could be told.
    """
    units = {one.layer: one for one in _in_graphs(model)}
    if not units:
        kinds = sorted({type(one).__name__ for one in model.modules() if not list(one.children())})
        raise WorkloadError(
            f"no layer of this {type(model).__name__} has units that one other layer alone reads, "
            f"through what is known of {', '.join(kinds)}",
            remedy="a linear layer or convolution, activations, then another, as in nn.Sequential",
        )
    order = [id(one) for one in model.modules()]
    return sorted(units.values(), key=lambda one: order.index(id(one.layer)))


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
        except Exception:  # of a user's forward, which need not bear being traced
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
                if all(calls[one] == 1 == owners[id(one.weight)] for one in both):
                    yield units


def _from(node: Any, part: Any, names: dict[Any, str]) -> Units | None:
    """The units that the layer called at `node` makes, if they are read as they have to be."""
    from torch import nn

    layer = part.get_submodule(node.target)
    if not _is_whole(layer):
        return None
    norms: list[Any] = []
    flat = False
    while len(node.users) == 1:
        before, node = node, next(iter(node.users))
        if node.op == "call_module":
            module = part.get_submodule(node.target)
            kind = type(module).__name__
            if _is_whole(module):
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


def _is_whole(module: Any) -> bool:
    from torch import nn

    return type(module) in (nn.Linear, nn.Conv2d) and getattr(module, "groups", 1) == 1


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
