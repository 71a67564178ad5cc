"""Train a supernet, and search it with the package's studies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from slipstream.arguments import as_integer
from slipstream.durations import Durations
from slipstream.errors import InvalidArgumentError, UnknownNameError, WorkloadError
from slipstream.nas.estimates import METRICS, estimate
from slipstream.nas.latency import predict_latency, time_ahead
from slipstream.nas.supernet import Supernet, need_supernet
from slipstream.nas.trace import op_name, owner_of
from slipstream.provenance import Provenance
from slipstream.search import Estimator, Study, study
from slipstream.search.metrics import State, parse_limits
from slipstream.units import with_article

Batch = tuple[torch.Tensor | Sequence[torch.Tensor], torch.Tensor]
_METRICS = {**METRICS, "latency": "ms"}
_MULTIPLE = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*x\b")


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
        batches: returns the (input, target) pairs of one epoch; an input is a tensor, or a tuple
            for a model that takes several.
        loss: function of output and target that returns a scalar.
        optimizer: optimizer of ``net.parameters()``.

    Raises:
        InvalidArgumentError: `batches` is not a function, a batch is not a pair or has another
            shape, or `optimizer` is that of another model.
        UnknownNameError: `sampling` is unknown.
        WorkloadError: `loss` fails, or does not return a scalar with gradients; or the loss or a
            gradient is NaN or infinite. The weights stay those before this step.
    """
    if sampling not in ("sandwich", "single-path"):
        raise UnknownNameError("sampling", sampling, ("sandwich", "single-path"))
    need_function("batches", batches, "that returns the batches of an epoch: lambda: loader")
    space, own = need_supernet(net).space, {id(p) for p in net.parameters()}
    if own.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
        raise InvalidArgumentError(
            "optimizer", "it trains no weights of the supernet, which are copies of the model's",
            remedy="create it with net.parameters()",
        )  # fmt: skip
    rng, step = np.random.default_rng(seed), 0
    extremes, drawn = ([], 1) if sampling == "single-path" else (
        [space.full, space.smallest], as_integer("subnets", subnets, 0))  # fmt: skip
    net.train()
    try:
        for _ in range(as_integer("epochs", epochs)):
            batch: Any
            for batch in batches():
                if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                    kind = with_article(type(batch).__name__)
                    raise InvalidArgumentError(
                        "batches", f"a batch is {kind}, not a pair of input and target"
                    )
                inputs, target = batch
                inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
                step += 1
                optimizer.zero_grad()
                configs = [*extremes, *(space.sample(rng) for _ in range(drawn))]
                for config in configs:
                    if not _backward(net.configure(config)(*inputs), target, loss, len(configs)):
                        raise _diverged(step, "loss", _first_infinite(net, inputs))
                gradients = {n: p.grad for n, p in net.net.named_parameters() if p.grad is not None}
                if not nn.utils.get_total_norm(list(gradients.values())).isfinite():
                    # The norm of finite gradients can overflow, too.
                    for name, gradient in gradients.items():
                        if not gradient.isfinite().all():
                            raise _diverged(step, "gradient", f"the gradient of {name}")
                optimizer.step()
    finally:
        net.configure(space.full)
        net.eval()


def _backward(
    output: Any, target: Any, loss: Callable[[Any, torch.Tensor], torch.Tensor], count: int
) -> bool:
    """Add the gradients of a mean of `count` losses; return whether the loss is finite."""
    try:
        value = loss(output, target) / count
        value.backward()
        return bool(value.isfinite())
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shapes = ", ".join(
            str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
            for value in (output, target)
        )
        raise WorkloadError(
            f"the loss of output and target failed ({shapes}): {error}", where="loss",
            remedy="pass a function of output and target that returns a scalar tensor",
        ) from error  # fmt: skip


def _first_infinite(net: Supernet, inputs: Sequence[torch.Tensor]) -> str:
    """Return the first layer of the configured sub-network with NaN, or else with infinity."""
    found: dict[bool, str] = {}
    with torch.no_grad():
        for node, value in net.run(inputs):
            if isinstance(value, torch.Tensor) and not value.isfinite().all():
                names = {"placeholder": "the input", "get_attr": f"the weight {node.target}"}
                layer = f"{op_name(node)} in {owner_of(node) or 'the model'}"
                found.setdefault(bool(value.isnan().any()), names.get(node.op, layer))
    # Masks of attention are infinite on purpose.
    return found.get(True) or found.get(False) or "the loss function"


def _diverged(step: int, kind: str, where: str) -> WorkloadError:
    return WorkloadError(
        f"the {kind} is NaN or infinite in step {step}, first in {where}", where="fit",
        remedy="check the data, or lower the learning rate",
    )  # fmt: skip


def calibrate(module: nn.Module, inputs: Iterable[torch.Tensor] | torch.Tensor) -> None:
    """Recompute the running statistics of batch norms as means over `inputs`.

    The statistics of the whole model are wrong for a sub-network, which therefore ranks at random.
    Without inputs nothing changes.

    Args:
        module: result of `Supernet.export`.
        inputs: batches for ``module(batch)``; a single tensor is one batch.
    """
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    batches = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    if not norms or not batches:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    with torch.no_grad():
        for batch in batches:
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
    calibration: Sequence[torch.Tensor] | torch.Tensor = (),
    strategy: str = "evolution",
    seed: int = 0,
    store: str | Path | None = None,
    name: str = "nas",
) -> Study:
    """Return a study of the sub-networks of a supernet, to be run with ``.run(budget=...)``.

    Candidates that break a constraint are rejected from their shapes, before they are evaluated.

    Args:
        score: function of an exported sub-network; higher is better, for example its accuracy.
        constraints: limits of ``params``, ``macs``, ``weight_bytes`` and ``latency`` (ms, see
            `predict_latency`), such as ``"<= 2e6"``, or ``"<= 0.5x"`` of the whole model.
        minimize: metrics to minimise next to the score, for a Pareto set.
        calibration: batches on which batch norms are recomputed before a sub-network is scored.
        strategy: strategy of `slipstream.search`.
        store: file of the study; None to keep it in memory.

    Raises:
        InvalidArgumentError: a constraint is malformed, or no sub-network satisfies it; or `score`
            is not a function.
        UnknownNameError: a metric is unknown.
    """
    need_supernet(net)
    need_function("score", score)
    metrics = {*(constraints or {}), *minimize}
    for metric in metrics - set(_METRICS):
        raise UnknownNameError("metric", metric, _METRICS)
    units = {m: unit for m, unit in _METRICS.items() if m in METRICS or m in metrics}

    durations = Durations()
    if "latency" in units:
        time_ahead(net, durations)

    def from_shapes(config: Mapping[str, Any]) -> dict[str, float]:
        if "latency" not in units:
            return dict(estimate(net, config))
        return {**estimate(net, config),
                "latency": predict_latency(net, config, durations=durations)}  # fmt: skip

    limits = {m: _absolute(net, m, text, from_shapes) for m, text in (constraints or {}).items()}

    def evaluate(config: Mapping[str, Any]) -> dict[str, float]:
        module = net.export(config)
        calibrate(module, calibration)
        return {"score": float(score(module)), **from_shapes(config)}

    return study(
        name, net.space.space, {"score": "max", **dict.fromkeys(minimize, "min")},
        estimator=Estimator(evaluate, {"score": "", **units}), constraints=limits,
        analytic=[Estimator(from_shapes, units, Provenance.SIMULATED)],
        strategy=strategy, seed=seed, store=store, start=_start(net, limits),
    )  # fmt: skip


def need_function(name: str, value: object, purpose: str = "of an exported sub-network") -> None:
    """Raise an error unless the argument `name` is callable."""
    if not callable(value):
        raise InvalidArgumentError(
            name, f"{with_article(type(value).__name__)} is not a function",
            remedy=f"pass a function {purpose}",
        )  # fmt: skip


def first_failure(study: Study) -> str:
    """Return why the first failed trial of a study failed."""
    failed = (str(trial.reason) for trial in study.trials if trial.state is State.FAILED)
    return next(failed, "the budget is too small")


def _absolute(
    net: Supernet, metric: str, text: str, sizes: Callable[[Any], dict[str, float]]
) -> str:
    """Return a limit with multiples of the whole model as numbers, and check it."""
    whole, least = (sizes(config)[metric] for config in (net.space.full, net.space.smallest))

    def shown(value: float) -> str:
        number = f"{value:.4g}" if metric == "latency" else str(math.floor(value))
        return f"{number} {_METRICS[metric]}".strip()

    absolute = absolute_limit(text, whole, shown)
    for limit in parse_limits({metric: absolute}, _METRICS):
        if limit.violation(least if limit.op[0] == "<" else whole):
            raise InvalidArgumentError(
                "constraints", f"no architecture has {metric} {absolute}: the smallest has "
                f"{least:,.10g}, the whole model {whole:,.10g}",
                remedy="choose a limit in between, or search a wider space",
            )  # fmt: skip
    return absolute


def absolute_limit(text: str, whole: float, shown: Callable[[float], str] = repr) -> str:
    """Return a limit in which multiples such as ``0.5x`` are replaced by those of `whole`."""
    return _MULTIPLE.sub(lambda match: shown(float(match[1]) * whole), str(text))


def _start(net: Supernet, limits: Mapping[str, str]) -> list[dict[str, int]]:
    """Return the smallest architecture, and without limits the whole one."""
    whole = [] if limits else [net.space.full]
    return [net.space.smallest, *whole]
