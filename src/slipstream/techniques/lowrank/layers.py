"""Replacement of the layers of a live model by low-rank products, and of their optimizer state.

    report = ss.lowrank.factorize(model, 0.25, optimizer=optimizer)   # then train on
    ss.lowrank.merge(model)                                           # dense again, for export

Some layers stay dense, as in the *hybrid* models of Pufferfish (Wang et al., MLSys 2021): the
first layer, whose errors propagate, the last one, which determines the output, and convolutions of
1 x 1 with a stride, which are shortcuts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from slipstream.errors import (
    InvalidArgumentError,
    SlipstreamWarning,
    UnknownNameError,
    WorkloadError,
)
from slipstream.surgery import ModuleSelection, exchange, exchange_parameters, why_fixed
from slipstream.tables import Drawing, Field, Table
from slipstream.techniques.lowrank.factors import NEAREST, Start, rank_for
from slipstream.techniques.lowrank.moments import carry, factor_pairs
from slipstream.techniques.lowrank.nn import (
    LOW_RANK,
    LowRankAttention,
    LowRankConv1d,
    LowRankConv2d,
    LowRankLinear,
    LowRankLSTM,
)

Wanted = float | int | Mapping[str, float | int]
"""A share of the full rank (float), a rank (int), or either by the layer's qualified name."""
Keep = Literal["ends", "none"]
_DENSE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LSTM, nn.MultiheadAttention)


@dataclass(frozen=True)
class FactorizedLayer:
    """Result for a layer.

    Attributes:
        rank, full: rank and full rank of its matrix, or of the largest of several; `rank` is 0 if
            the layer stays dense.
        before, after: number of its parameters.
        lost: share of its weights' squared norm missing from the product.
        reason: why it stays dense; empty if it does not.
    """

    name: str
    rank: int
    full: int
    before: int
    after: int
    lost: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """Layers that have a low-rank form, in the model's order.

    Attributes:
        parameters_before, parameters: number of parameters of the whole model.
    """

    layers: tuple[FactorizedLayer, ...]
    parameters_before: int
    parameters: int

    @property
    def changed(self) -> tuple[FactorizedLayer, ...]:
        """Layers that were replaced by products."""
        return tuple(layer for layer in self.layers if not layer.reason)

    def table(self) -> Table:
        """Return ranks by layer, with bars that show the share of the full rank."""
        note = f"{self.parameters_before:,} parameters became {self.parameters:,}"
        return Table.of(self.layers, _FIELDS, "Ranks by layer", [note])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dictionary."""
        return {
            "parameters_before": self.parameters_before,
            "parameters": self.parameters,
            "layers": [vars(layer) for layer in self.layers],
        }


def _rank_bar(layer: FactorizedLayer) -> Drawing:
    """Return a bar of the share of the full rank; a dense layer has the full rank."""
    share = layer.rank / layer.full if layer.rank else 1.0
    filled = max(1, round(_BAR_WIDTH * share))
    bar = "█" * filled + "·" * (_BAR_WIDTH - filled)
    return Drawing.share(share, f"{bar} {layer.rank or layer.full} of {layer.full}")


_BAR_WIDTH = 20
_FIELDS = (
    Field[FactorizedLayer].of("Layer", lambda layer: layer.name),
    Field[FactorizedLayer].of("Rank", _rank_bar),
    Field[FactorizedLayer].number("Parameters", lambda layer: f"{layer.before:,}"),
    Field[FactorizedLayer].number("After", lambda layer: f"{layer.after:,}"),
    Field[FactorizedLayer].of(
        "", lambda layer: layer.reason or f"{100 * layer.lost:.1f} % of its norm lost"
    ),
)


def plan(
    model: nn.Module,
    rank: Wanted = 0.25,
    *,
    keep: Keep = "ends",
    only: str = "*",
    except_: str = "",
    must_shrink: bool = True,
) -> Report:
    """Return the report of `factorize` for a model, which may be on the meta device.

    Arguments and errors are those of `factorize`.
    """
    named_ranks = rank if isinstance(rank, Mapping) else {}
    modules = dict(model.named_modules(remove_duplicate=False))
    named_layers = candidates(model)
    for name in named_ranks:
        if name not in modules:
            raise UnknownNameError("layer", name, modules)
        if (reason := why_dense(model, modules[name])) is not None:
            raise InvalidArgumentError("rank", reason, where=f"layer {name}")
    selection = ModuleSelection(only, except_)
    selection.require_match("lowrank", [name for name, _ in named_layers])
    ends = set() if keep == "none" or named_ranks else _ends(candidates(model, products=True))
    layers: list[FactorizedLayer] = []
    for name, dense in named_layers:
        requested = named_ranks.get(name) if isinstance(rank, Mapping) else rank
        if requested is None:
            layers.append(_stays(name, dense, "not named"))
        elif name not in selection:
            layers.append(_stays(name, dense, "excluded by its name"))
        elif (reason := why_dense(model, dense)) is not None:
            layers.append(_stays(name, dense, reason))
        elif name in ends:
            layers.append(_stays(name, dense, "the first or last layer, or a shortcut"))
        else:
            layers.append(_planned(name, dense, requested, must_shrink, named=bool(named_ranks)))
    saved = sum(layer.before - layer.after for layer in layers)
    before = count(model)
    return Report(tuple(layers), before, before - saved)


def factorize(
    model: nn.Module,
    rank: Wanted = 0.25,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    keep: Keep = "ends",
    only: str = "*",
    except_: str = "",
    must_shrink: bool = True,
    start: Start = NEAREST,
    carry_moments: bool = True,
) -> Report:
    """Replace dense layers by the nearest low-rank products, in place.

    Untrained random weights give spectral initialisation; trained weights give the best start
    after a warm-up. Biases and all other parameters remain the same objects.

    Args:
        rank: for every layer, or by name: then only these layers are replaced, and `keep` is
            ignored. A rank (int) for all layers leaves layers of a lower full rank dense, such as
            depthwise convolutions.
        optimizer: its parameter groups get the factors instead of the weights.
        keep: ``ends`` leaves the first and the last layer and shortcut convolutions dense.
        only, except_: patterns of modules' qualified names.
        must_shrink: leave layers dense that would have no fewer parameters as products. If False,
            layers may grow; a warning names them.
        start: initialisation of the factors; for untrained random weights, use
            ``Start(keep_norm=True)``.
        carry_moments: convert the optimizer's state to the factors, see
            `slipstream.techniques.lowrank.moments`; otherwise the state of the factors is empty.

    Raises:
        InvalidArgumentError: a rank is invalid for its layer, a layer is on the meta device, a
            named layer cannot be replaced, or there is no layer to replace.
        UnknownNameError: a rank names a layer that the model does not have.
        WorkloadError: `only` or `except_` selects no layer.
    """
    report = plan(model, rank, keep=keep, only=only, except_=except_, must_shrink=must_shrink)
    if not report.changed:
        reasons = "; ".join(f"{layer.name}: {layer.reason}" for layer in report.layers[:4])
        raise InvalidArgumentError(
            "model", f"has no layer to replace by a low-rank product ({reasons or 'no layer'})",
            remedy="select others with rank=R, only=GLOB or keep=none",
        )  # fmt: skip
    for layer in report.changed:
        if any(p.is_meta for p in model.get_submodule(layer.name).parameters()):
            raise InvalidArgumentError(
                "model", "its weights are on the meta device and have no values to decompose",
                where=f"layer {layer.name}",
                remedy="use model.to_empty(device=...), then initialise",
            )  # fmt: skip
    grown = [f"{layer.name}: {layer.before} to {layer.after}" for layer in report.changed
             if layer.after > layer.before]  # fmt: skip
    if grown:
        warnings.warn(
            f"{len(grown)} layers have more parameters as products ({'; '.join(grown[:4])}); "
            "use must_shrink=True or a lower rank",
            SlipstreamWarning, stacklevel=2,
        )  # fmt: skip
    layers = []
    for layer in report.layers:
        if layer.reason:
            layers.append(layer)
            continue
        dense: Any = model.get_submodule(layer.name)
        requested = rank[layer.name] if isinstance(rank, Mapping) else rank
        product = low_rank_form(dense, requested, start)
        if optimizer is not None:
            _replace_parameters(optimizer, dense, product, carry_moments)
        layers.append(replace(layer, lost=_lost(dense, product)))
        exchange(model, layer.name, product)
    return replace(report, layers=tuple(layers))


def candidates(model: nn.Module, *, products: bool = False) -> list[tuple[str, Any]]:
    """Return names and layers that have a low-rank form, in the model's order, without inner ones.

    Args:
        products: include layers that are already products.
    """
    kinds = (*_DENSE, *LOW_RANK) if products else _DENSE
    layers: list[tuple[str, Any]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if type(module) in (*LOW_RANK, nn.MultiheadAttention):
            inside = (*inside, f"{name}.")
        if type(module) in kinds and name:
            layers.append((name, module))
    return layers


def why_dense(model: nn.Module, module: Any) -> str | None:
    """Return why a layer has no low-rank form; None if it has."""
    if type(module) not in _DENSE:
        return (
            f"{type(module).__name__} is not a plain nn.Linear, nn.Conv1d, nn.Conv2d, nn.LSTM or "
            "nn.MultiheadAttention"
        )
    if (reason := why_fixed(model, module)) is not None:
        return reason
    if isinstance(module, nn.LSTM) and module.proj_size:
        return "it projects its states"
    if isinstance(module, nn.MultiheadAttention) and (
        module.bias_k is not None or module.add_zero_attn
    ):
        return "it adds bias or zero keys"
    return None


def _ends(layers: list[tuple[str, Any]]) -> set[str]:
    outer = (layers[0], layers[-1]) if len(layers) > 2 else layers[-1:]
    names = {name for name, _ in outer}
    for name, module in layers:
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) != module.stride:
            names.add(name)
    return names


def _planned(
    name: str, dense: Any, rank: float | int, must_shrink: bool, *, named: bool
) -> FactorizedLayer:
    shapes = matrices(dense)
    full = min(min(shape) for shape in shapes)
    if not named and isinstance(rank, int) and rank > full:
        return _stays(name, dense, f"rank {rank} is above its full rank of {full}")
    try:
        ranks = ranks_of(dense, rank)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            "rank", error.what.partition(": ")[2] or error.what, where=f"layer {name}",
            remedy=error.remedy,
        ) from error  # fmt: skip
    before = count(dense)
    after = before + sum(r * (m + n) - m * n for r, (m, n) in zip(ranks, shapes, strict=True))
    if must_shrink and after >= before:
        return _stays(name, dense, f"rank {max(ranks)} would have no fewer parameters")
    return FactorizedLayer(name, max(ranks), max(min(shape) for shape in shapes), before, after)


def _stays(name: str, dense: Any, reason: str) -> FactorizedLayer:
    parameters, full = count(dense), max(min(shape) for shape in matrices(dense))
    return FactorizedLayer(name, 0, full, parameters, parameters, reason=reason)


def matrices(dense: Any) -> list[tuple[int, int]]:
    """Return (rows, columns) of every matrix of a layer that becomes a product."""
    if isinstance(dense, nn.LSTM):
        gate = dense.hidden_size
        return [
            (gate, p.shape[1])
            for name, p in dense.named_parameters()
            if name.startswith("weight")
            for _ in range(4)
        ]
    if isinstance(dense, nn.MultiheadAttention):
        e = dense.embed_dim
        return [(e, e), (e, dense.kdim), (e, dense.vdim), (e, e)]
    weight = dense.weight
    groups = getattr(dense, "groups", 1)
    return [(weight.shape[0] // groups, weight[0].numel())] * groups


def ranks_of(dense: Any, rank: float | int) -> list[int]:
    """Return the ranks of `matrices`."""
    return [rank_for(rank, *shape) for shape in matrices(dense)]


def low_rank_form(dense: Any, rank: float | int, start: Start = NEAREST) -> nn.Module:
    """Return the nearest low-rank layer to a dense one, which shares its bias.

    Raises:
        InvalidArgumentError: the rank is invalid for the layer, or the layer has no such form.
    """
    layer: nn.Module
    if isinstance(dense, nn.LSTM):
        layer = LowRankLSTM(dense, rank, start)
    elif isinstance(dense, nn.MultiheadAttention):
        layer = LowRankAttention(dense, rank, start)
    elif isinstance(dense, nn.Linear):
        layer = LowRankLinear.of(dense.weight, dense.bias, ranks_of(dense, rank)[0], start)
    else:
        kind = LowRankConv1d if isinstance(dense, nn.Conv1d) else LowRankConv2d
        layer = kind.of(dense, ranks_of(dense, rank)[0], start)
    for source, _, *factors in factor_pairs(dense, layer):
        for factor in factors:
            factor.requires_grad_(source.requires_grad)
    if isinstance(layer, LowRankAttention) and layer.q.bias is not None:
        for part in (layer.q, layer.k, layer.v):
            part.second.bias.requires_grad_(dense.in_proj_bias.requires_grad)
    return layer.train(dense.training)


def _weights(module: Any) -> list[Any]:
    return [
        parameter
        for name, parameter in module.named_parameters()
        if "weight" in name.rpartition(".")[2]
    ]


def _lost(dense: Any, product: Any) -> float:
    """Return the share of the squared norm of all weights that is missing from the products."""
    with torch.no_grad():
        merged = _weights(product.merged())
        pairs = list(zip(_weights(dense), merged, strict=True))
        total = sum(float(a.double().square().sum()) for a, _ in pairs)
        error = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return error / total if total else 0.0


def _replace_parameters(
    optimizer: torch.optim.Optimizer, replaced: Any, replacement: Any, moments: bool
) -> None:
    """Replace the parameters of one module by those of another in `optimizer`."""
    new_ids = {id(p) for p in replacement.parameters()}
    old_ids = {id(p) for p in replaced.parameters()}
    old = [p for p in replaced.parameters() if id(p) not in new_ids]
    new = [p for p in replacement.parameters() if id(p) not in old_ids]
    carried = carry(optimizer, replaced, replacement) if moments else {}
    exchange_parameters(optimizer, old, *new)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for parameter, state in carried.items():
        if id(parameter) in trained:
            optimizer.state[parameter] = state


def merge(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Replace every low-rank layer of `model` by its dense product, in place; return their number.

    Args:
        optimizer: its groups get the dense weights instead of the factors, without their state.
    """
    products = [(n, m) for n, m in model.named_modules() if n and isinstance(m, LOW_RANK)]
    attentions = tuple(f"{n}." for n, m in products if isinstance(m, LowRankAttention))
    outermost = [(n, m) for n, m in products if not n.startswith(attentions) or not attentions]
    for name, module in outermost:
        dense = module.merged()
        for weight, _, *factors in factor_pairs(dense, module):
            weight.requires_grad_(any(factor.requires_grad for factor in factors))
        if isinstance(module, LowRankAttention) and dense.in_proj_bias is not None:
            dense.in_proj_bias.requires_grad_(module.q.second.bias.requires_grad)
        if optimizer is not None:
            _replace_parameters(optimizer, module, dense, moments=False)
        exchange(model, name, dense)
    return len(outermost)


def switch(model: nn.Module, change: Callable[[nn.Module], object]) -> nn.Module:
    """Change a model that may be compiled or in DistributedDataParallel; return the model to train.

    DistributedDataParallel is constructed again, because its reducer is tied to the parameters it
    was constructed with. A compiled model is compiled again at its next call.

    Args:
        change: function that changes the wrapped model in place.

    Raises:
        WorkloadError: DistributedDataParallel has a communication hook, see `need_hookless`.
    """
    need_hookless(model)
    from torch.nn.parallel import DistributedDataParallel

    inner: Any = model
    replicas: Any = None
    while True:
        if isinstance(inner, DistributedDataParallel):
            replicas, inner = inner, inner.module
        elif hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        else:
            break
    change(inner)
    if replicas is None:
        return model
    rebuilt: Any = DistributedDataParallel(
        replicas.module, bucket_cap_mb=replicas.bucket_bytes_cap / (1 << 20)
    )
    replicated: nn.Module = rebuilt
    return replicated


def need_hookless(model: Any) -> None:
    """Raise a `WorkloadError` if DistributedDataParallel has a communication hook.

    The state of a compressor belongs to dense gradients and cannot be converted.
    """
    if getattr(model, "_comm_hooks", None):
        raise WorkloadError(
            "gradients are compressed by a hook whose state belongs to the dense parameters",
            remedy="use lowrank without warmup and auto, or ddp without compression",
        )


def count(module: nn.Module) -> int:
    """Return the number of parameters, shared ones once."""
    return sum(p.numel() for p in module.parameters())
