"""Exchange the layers of a live model for products of thin matrices, its optimizer included.

    report = ss.lowrank.factorize(model, 0.25, optimizer=optimizer)   # then train on
    ss.lowrank.merge(model)                                           # dense again, for export

Which layers stay dense is the *hybrid* part of Pufferfish (Wang et al., MLSys 2021): errors of
early layers spread, and the last one decides; so the first and the last layer stay, and
convolutions of 1 x 1 with a stride, which are shortcuts.
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
"""A share of the full rank, a rank, or either by the layer's qualified name."""
Keep = Literal["ends", "none"]
_DENSE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LSTM, nn.MultiheadAttention)


@dataclass(frozen=True)
class FactorizedLayer:
    """What became of a layer.

    Attributes:
        rank, full: of its matrix; the largest of several matrices; 0 where it stays dense.
        before, after: numbers of its parameters.
        lost: share of its weights' squared norm that the product lacks.
        reason: why it stays dense; empty where it does not.
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
    """Every layer that could have a low rank, in the model's order.

    Attributes:
        parameters_before, parameters: of the whole model.
    """

    layers: tuple[FactorizedLayer, ...]
    parameters_before: int
    parameters: int

    @property
    def changed(self) -> tuple[FactorizedLayer, ...]:
        """Those that are products now."""
        return tuple(one for one in self.layers if not one.reason)

    def table(self) -> Table:
        """Ranks by layer, as a picture: a bar as long as the share of the full rank."""
        note = f"{self.parameters_before:,} parameters became {self.parameters:,}"
        return Table.of(self.layers, _FIELDS, "Ranks by layer", [note])

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "parameters_before": self.parameters_before,
            "parameters": self.parameters,
            "layers": [vars(one) for one in self.layers],
        }


def _picture(layer: FactorizedLayer) -> Drawing:
    """A bar as long as the share of the full rank; a dense layer's is full."""
    share = layer.rank / layer.full if layer.rank else 1.0
    filled = max(1, round(_BAR * share))
    bar = "█" * filled + "·" * (_BAR - filled)
    return Drawing.share(share, f"{bar} {layer.rank or layer.full} of {layer.full}")


_BAR = 20
_FIELDS = (
    Field[FactorizedLayer].of("Layer", lambda one: one.name),
    Field[FactorizedLayer].of("Rank", _picture),
    Field[FactorizedLayer].number("Numbers", lambda one: f"{one.before:,}"),
    Field[FactorizedLayer].number("Now", lambda one: f"{one.after:,}"),
    Field[FactorizedLayer].of(
        "", lambda one: one.reason or f"{100 * one.lost:.1f} % of its norm lost"
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
    """What `factorize` would make of a model, which may be on the meta device.

    Args, and what is raised: as of `factorize`.
    """
    named = rank if isinstance(rank, Mapping) else {}
    known = dict(model.named_modules(remove_duplicate=False))
    every = candidates(model)
    for name in named:
        if name not in known:
            raise UnknownNameError("layer", name, known)
        if (reason := why_dense(model, known[name])) is not None:
            raise InvalidArgumentError("rank", reason, where=f"layer {name}")
    selection = ModuleSelection(only, except_)
    selection.need_some("lowrank", [name for name, _ in every])
    ends = set() if keep == "none" or named else _ends(candidates(model, products=True))
    layers: list[FactorizedLayer] = []
    for name, dense in every:
        wanted = named.get(name) if isinstance(rank, Mapping) else rank
        if wanted is None:
            layers.append(_stays(name, dense, "not named"))
        elif name not in selection:
            layers.append(_stays(name, dense, "left out by its name"))
        elif (reason := why_dense(model, dense)) is not None:
            layers.append(_stays(name, dense, reason))
        elif name in ends:
            layers.append(_stays(name, dense, "the first or last layer, or a shortcut"))
        else:
            layers.append(_planned(name, dense, wanted, must_shrink, named=bool(named)))
    saved = sum(one.before - one.after for one in layers)
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
    """Put the nearest products in the place of dense layers, in `model` itself.

    Weights that were drawn a moment ago give spectral initialisation; trained ones the best start
    after a warm-up. Biases and all other parameters stay the same objects.

    Args:
        rank: of every layer, or by name: then of these alone, and `keep` does not matter. Layers
            whose full rank is below an integer for all, such as depthwise convolutions, stay dense.
        optimizer: gets the factors in the place of the weights, in their groups.
        keep: ``ends`` leaves the first and the last layer dense, and shortcut convolutions.
        only, except_: patterns of modules' qualified names.
        must_shrink: leave layers dense that would have no fewer numbers as products. If False,
            layers may grow; a warning names them.
        start: how the factors begin; of weights that were drawn and not trained yet, take
            ``Start(keep_norm=True)``.
        carry_moments: take what the optimizer remembers along, see
            `slipstream.techniques.lowrank.moments`; else it starts anew on the factors.

    Raises:
        InvalidArgumentError: a rank that cannot be, with its layer; a layer on the meta device; a
            layer that was named and cannot be exchanged; or nothing is left to exchange.
        UnknownNameError: a rank for a layer that the model lacks.
        WorkloadError: `only` or `except_` names no layer.
    """
    report = plan(model, rank, keep=keep, only=only, except_=except_, must_shrink=must_shrink)
    if not report.changed:
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in report.layers[:4])
        raise InvalidArgumentError(
            "model", f"has no layer that can be a thin product ({reasons or 'no layer'})",
            remedy="rank=R, only=GLOB or keep=none change what is taken",
        )  # fmt: skip
    for one in report.changed:
        if any(p.is_meta for p in model.get_submodule(one.name).parameters()):
            raise InvalidArgumentError(
                "model", "its weights are on the meta device: there is nothing to decompose",
                where=f"layer {one.name}", remedy="model.to_empty(device=...) and initialise it",
            )  # fmt: skip
    grown = [f"{layer.name}: {layer.before} to {layer.after}" for layer in report.changed
             if layer.after > layer.before]  # fmt: skip
    if grown:
        warnings.warn(
            f"{len(grown)} layers have more numbers as products ({'; '.join(grown[:4])}); "
            "must_shrink=True or a lower rank leaves none of them larger",
            SlipstreamWarning, stacklevel=2,
        )  # fmt: skip
    layers = []
    for one in report.layers:
        if one.reason:
            layers.append(one)
            continue
        dense: Any = model.get_submodule(one.name)
        wanted = rank[one.name] if isinstance(rank, Mapping) else rank
        product = low_rank_form(dense, wanted, start)
        if optimizer is not None:
            _retrain(optimizer, dense, product, carry_moments)
        layers.append(replace(one, lost=_lost(dense, product)))
        exchange(model, one.name, product)
    return replace(report, layers=tuple(layers))


def candidates(model: nn.Module, *, products: bool = False) -> list[tuple[str, Any]]:
    """Layers by name that have a low-rank form, in the model's order; those inside others not.

    Args:
        products: include layers that are products already.
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
    """None, or why a layer has no low-rank form here."""
    if type(module) not in _DENSE:
        return (
            f"{type(module).__name__} is no plain nn.Linear, nn.Conv1d, nn.Conv2d, nn.LSTM or "
            "nn.MultiheadAttention"
        )
    if (reason := why_fixed(model, module)) is not None:
        return reason
    if isinstance(module, nn.LSTM) and module.proj_size:
        return "it projects its states"
    if isinstance(module, nn.MultiheadAttention) and (
        module.bias_k is not None or module.add_zero_attn
    ):
        return "it adds keys of its own"
    return None


def _ends(every: list[tuple[str, Any]]) -> set[str]:
    names = {every[0][0], every[-1][0]} if len(every) > 2 else {every[-1][0]} if every else set()
    for name, module in every:
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) != module.stride:
            names.add(name)
    return names


def _planned(
    name: str, dense: Any, wanted: float | int, must_shrink: bool, *, named: bool
) -> FactorizedLayer:
    shapes = matrices(dense)
    full = min(min(shape) for shape in shapes)
    if not named and isinstance(wanted, int) and wanted > full:
        return _stays(name, dense, f"rank {wanted} is above its full rank of {full}")
    try:
        ranks = ranks_of(dense, wanted)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            "rank", error.what.partition(": ")[2] or error.what, where=f"layer {name}",
            remedy=error.remedy,
        ) from error  # fmt: skip
    before = count(dense)
    after = before + sum(r * (m + n) - m * n for r, (m, n) in zip(ranks, shapes, strict=True))
    if must_shrink and after >= before:
        return _stays(name, dense, f"rank {max(ranks)} would have no fewer numbers")
    return FactorizedLayer(name, max(ranks), max(min(shape) for shape in shapes), before, after)


def _stays(name: str, dense: Any, reason: str) -> FactorizedLayer:
    numbers, full = count(dense), max(min(shape) for shape in matrices(dense))
    return FactorizedLayer(name, 0, full, numbers, numbers, reason=reason)


def matrices(dense: Any) -> list[tuple[int, int]]:
    """(rows, columns) of every matrix of a layer that becomes a product."""
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


def ranks_of(dense: Any, wanted: float | int) -> list[int]:
    """Of `matrices`."""
    return [rank_for(wanted, *shape) for shape in matrices(dense)]


def low_rank_form(dense: Any, wanted: float | int, start: Start = NEAREST) -> nn.Module:
    """The nearest low-rank layer to a dense one, which it leaves alone but for its bias.

    Raises:
        InvalidArgumentError: no such rank, or no such layer.
    """
    layer: nn.Module
    if isinstance(dense, nn.LSTM):
        layer = LowRankLSTM(dense, wanted, start)
    elif isinstance(dense, nn.MultiheadAttention):
        layer = LowRankAttention(dense, wanted, start)
    elif isinstance(dense, nn.Linear):
        layer = LowRankLinear.of(dense.weight, dense.bias, ranks_of(dense, wanted)[0], start)
    else:
        kind = LowRankConv1d if isinstance(dense, nn.Conv1d) else LowRankConv2d
        layer = kind.of(dense, ranks_of(dense, wanted)[0], start)
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


def _lost(dense: Any, made: Any) -> float:
    """Share of the squared norm of all weights that the products lack."""
    with torch.no_grad():
        merged = _weights(made.merged())
        pairs = list(zip(_weights(dense), merged, strict=True))
        total = sum(float(a.double().square().sum()) for a, _ in pairs)
        off = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return off / total if total else 0.0


def _retrain(optimizer: torch.optim.Optimizer, dense: Any, made: Any, moments: bool) -> None:
    """Let `optimizer` train what is new, in the place of what is gone."""
    stay = {id(p) for p in made.parameters()}
    held = {id(p) for p in dense.parameters()}
    old = [p for p in dense.parameters() if id(p) not in stay]
    new = [p for p in made.parameters() if id(p) not in held]
    carried = carry(optimizer, dense, made) if moments else {}
    exchange_parameters(optimizer, old, *new)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for parameter, state in carried.items():
        if id(parameter) in trained:
            optimizer.state[parameter] = state


def merge(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Multiply every low-rank layer of `model` out, in place; how many there were.

    Args:
        optimizer: gets the dense weights in the place of the factors, without what it remembers.
    """
    every = [(n, m) for n, m in model.named_modules() if n and isinstance(m, LOW_RANK)]
    inner = tuple(f"{n}." for n, m in every if isinstance(m, LowRankAttention))
    outer = [(n, m) for n, m in every if not n.startswith(inner) or not inner]
    for name, module in outer:
        dense = module.merged()
        for weight, _, *factors in factor_pairs(dense, module):
            weight.requires_grad_(any(factor.requires_grad for factor in factors))
        if isinstance(module, LowRankAttention) and dense.in_proj_bias is not None:
            dense.in_proj_bias.requires_grad_(module.q.second.bias.requires_grad)
        if optimizer is not None:
            _retrain(optimizer, module, dense, moments=False)
        exchange(model, name, dense)
    return len(outer)


def switch(model: nn.Module, change: Callable[[nn.Module], object]) -> nn.Module:
    """Change a model that may be compiled, or in DistributedDataParallel; what to train on with.

    The replicas' reducer knows the parameters it was made with: where there is one it is made
    anew. A compiled model is compiled again at its next call.

    Args:
        change: is given the model inside, which it changes in place.

    Raises:
        WorkloadError: a communication hook is on the replicas, see `need_hookless`.
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
    again: Any = DistributedDataParallel(
        replicas.module, bucket_cap_mb=replicas.bucket_bytes_cap / (1 << 20)
    )
    replaced: nn.Module = again
    return replaced


def need_hookless(model: Any) -> None:
    """Raise a `WorkloadError` where a hook of DistributedDataParallel knows the parameters' names.

    What a compressor has kept of gradients is of the dense ones, and has no place afterwards.
    """
    if getattr(model, "_comm_hooks", None):
        raise WorkloadError(
            "gradients are compressed by a hook that knows the dense parameters",
            remedy="lowrank without warmup and auto, or ddp without compression",
        )


def count(module: nn.Module) -> int:
    """Numbers of its parameters, each once."""
    return sum(p.numel() for p in module.parameters())
