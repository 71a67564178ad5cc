"""Train a supernet, and search it with the package's studies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.nas.estimates import METRICS, estimate
from slipstream.nas.supernet import Supernet
from slipstream.provenance import Provenance
from slipstream.search import Estimator, Study, study

Batch = tuple[torch.Tensor, torch.Tensor]


def fit(
    net: Supernet,
    batches: Callable[[], Iterable[Batch]],
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int = 1,
    sampling: str = "sandwich",
    subnets: int = 2,
    seed: int = 0,
) -> None:
    """Train the shared weights of a supernet.

    With ``"sandwich"`` each step adds the gradients of the whole model, the smallest sub-network
    and `subnets` random ones (Yu and Huang, ICCV 2019); with ``"single-path"`` those of one random
    sub-network (Guo et al., ECCV 2020).

    Args:
        batches: returns the (input, target) pairs of one epoch.
        loss: function of output and target that returns a scalar.
        optimizer: optimizer of ``net.parameters()``.

    Raises:
        UnknownNameError: `sampling` is unknown.
    """
    if sampling not in ("sandwich", "single-path"):
        raise UnknownNameError("sampling", sampling, ("sandwich", "single-path"))
    rng, space = np.random.default_rng(seed), net.space
    net.train()
    for _ in range(epochs):
        for inputs, target in batches():
            optimizer.zero_grad()
            configs = [space.sample(rng)]
            if sampling == "sandwich":
                others = [space.sample(rng) for _ in range(subnets - 1)]
                configs = [space.full, space.smallest, *configs, *others]
            for config in configs:
                net.configure(config)
                (loss(net(inputs), target) / len(configs)).backward()
            optimizer.step()
    net.configure(space.full)
    net.eval()


def calibrate(module: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
    """Recompute the running statistics of batch norms as means over `inputs`.

    The statistics of the whole model are wrong for a sub-network, which therefore ranks at random.
    """
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    with torch.no_grad():
        for batch in inputs:
            module(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def search(
    net: Supernet,
    score: Callable[[nn.Module], float],
    *,
    constraints: Mapping[str, str] | None = None,
    minimize: Sequence[str] = (),
    calibration: Sequence[torch.Tensor] = (),
    strategy: str = "evolution",
    seed: int = 0,
    store: str | Path | None = None,
    name: str = "nas",
) -> Study:
    """Return a study of the sub-networks of a supernet, to be run with ``.run(budget=...)``.

    Candidates that break a constraint are rejected from their shapes, before they are evaluated.

    Args:
        score: function of an exported sub-network; higher is better, for example its accuracy.
        constraints: limits of ``params``, ``macs`` and ``weight_bytes``, such as ``"<= 2e6"``, or
            ``"<= 0.5x"`` of the whole model.
        minimize: metrics to minimise next to the score, for a Pareto set.
        calibration: inputs on which batch norms are recomputed before a sub-network is scored.
        strategy: strategy of `slipstream.search`.
        store: file of the study; None to keep it in memory.

    Raises:
        InvalidArgumentError: even the smallest sub-network breaks a constraint.
        UnknownNameError: a metric is unknown.
    """
    for metric in (*(constraints or {}), *minimize):
        if metric not in METRICS:
            raise UnknownNameError("metric", metric, METRICS)
    limits = {m: _absolute(net, m, text) for m, text in (constraints or {}).items()}

    def evaluate(config: Mapping[str, Any]) -> dict[str, float]:
        module = net.export(config)
        calibrate(module, calibration)
        return {"score": float(score(module)), **estimate(net, config)}

    def from_shapes(config: Mapping[str, Any]) -> dict[str, float]:
        return dict(estimate(net, config))

    return study(
        name, net.space.space, {"score": "max", **dict.fromkeys(minimize, "min")},
        estimator=Estimator(evaluate, {"score": "", **METRICS}), constraints=limits,
        analytic=[Estimator(from_shapes, METRICS, Provenance.SIMULATED)],
        strategy=strategy, seed=seed, store=store, start=_start(net, limits),
    )  # fmt: skip


def _absolute(net: Supernet, metric: str, text: str) -> str:
    """Return a limit that is a multiple of the whole model as a number, and check it."""
    sign, _, bound = text.strip().partition("=")
    if sign != "<":
        raise InvalidArgumentError(
            "constraints", f"'{metric} {text}' is not an upper limit", remedy="write '<= 0.5x'"
        )
    whole, least = estimate(net, net.space.full)[metric], estimate(net, net.space.smallest)[metric]
    try:
        bound = bound.strip()
        value = float(bound[:-1]) * whole if bound.endswith("x") else float(bound)
    except ValueError:
        raise InvalidArgumentError(
            "constraints", f"'{bound}' of {metric} is not a number",
            remedy="write a number, or a multiple of the whole model such as 0.5x",
        ) from None  # fmt: skip
    if least > value:
        raise InvalidArgumentError(
            "constraints", f"no architecture has {metric} <= {value:,.0f}: the smallest has "
            f"{least:,}, the whole model {whole:,}",
            remedy=f"allow at least {least / whole:.2f}x, or search a wider space",
        )  # fmt: skip
    return f"<= {value:.0f}" + (METRICS[metric] and f" {METRICS[metric]}")


def _start(net: Supernet, limits: Mapping[str, str]) -> list[dict[str, int]]:
    """Return the smallest architecture, and without limits the whole one."""
    whole = [] if limits else [net.space.full]
    return [net.space.smallest, *whole]
