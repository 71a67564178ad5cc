"""Models that are chains of layers, for techniques that run the layers separately."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from slipstream.errors import WorkloadError
from slipstream.units import with_article
from slipstream.workload import BuiltWorkload

_TIMED_RUNS = 3


def shared_batch(built: BuiltWorkload, technique: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of rank 0's batch, on every rank.

    Raises:
        WorkloadError: there is no loss, or the batch is not a pair of tensors of equal length.
    """
    parts = built.batch if isinstance(built.batch, (tuple, list)) else ()
    rows = [len(part) for part in parts if isinstance(part, torch.Tensor) and part.dim()]
    if built.loss is None or (len(parts), len(rows), len(set(rows))) != (2, 2, 1):
        raise WorkloadError(
            f"{technique} needs a loss, and a batch of two tensors: inputs and a target for each",
            remedy="return (model, (inputs, targets), loss, optimizer)",
        )
    inputs, targets = (part.detach().contiguous() for part in parts)
    for part in (inputs, targets):
        dist.broadcast(part, 0)
    return inputs, targets


def chain(model: nn.Module, technique: str, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield names and layers of nested ``nn.Sequential`` containers, in order.

    Args:
        prefix: what the names begin with.

    Raises:
        WorkloadError: the model is another module, or its containers have hooks.
    """
    if type(model) is not nn.Sequential:
        raise WorkloadError(
            f"{technique} runs chains of layers, but the model is {type(model).__name__}",
            remedy="wrap its layers in nn.Sequential, or split it with "
            "torch.distributed.pipelining.pipeline",
        )
    hooks = (model._forward_pre_hooks, model._forward_hooks, model._backward_hooks)
    if "forward" in vars(model) or model._compiled_call_impl is not None or any(hooks):
        raise WorkloadError(
            f"{technique} runs the layers separately, which would skip the hooks, autocast or "
            "compilation of their container",
            remedy=f"run {technique} without amp, compile and other techniques for the whole model",
        )
    for name, layer in model._modules.items():
        if type(layer) is nn.Sequential:
            yield from chain(layer, technique, f"{prefix}{name}.")
        else:
            yield prefix + name, layer


def writable(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a copy if the layer overwrites its input."""
    return x.clone() if getattr(layer, "inplace", False) else x


def layer_times(layers: Sequence[nn.Module], x: torch.Tensor) -> list[float]:
    """Return the seconds of forward and backward pass of each layer."""
    best = [float("inf")] * len(layers)
    states = [{name: b.clone() for name, b in layer.named_buffers()} for layer in layers]
    for _ in range(_TIMED_RUNS):
        value = x
        for number, layer in enumerate(layers):
            began = time.perf_counter()
            leaf = value.detach().requires_grad_(value.is_floating_point())
            value = layer(writable(layer, leaf))
            sources = [t for t in (leaf, *layer.parameters()) if t.requires_grad]
            if sources:
                torch.autograd.grad(value.sum(), sources, allow_unused=True)
            best[number] = min(best[number], time.perf_counter() - began)
    for layer, state in zip(layers, states, strict=True):
        for name, buffer in layer.named_buffers():
            buffer.copy_(state[name])
    return best


class LayerMessage(NamedTuple):
    """Output of a layer for a micro-batch, and whether its gradient is computed."""

    shape: torch.Size
    dtype: torch.dtype
    trains: bool


def layer_messages(layers: Sequence[nn.Module], x: torch.Tensor) -> list[LayerMessage]:
    """Return what follows each layer.

    Raises:
        WorkloadError: a layer returns something other than a tensor.
    """
    messages, trains = [], False
    modes = [(module, module.training) for layer in layers for module in layer.modules()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        value = x
        for number, layer in enumerate(layers):
            value = layer.eval()(writable(layer, value))
            if not isinstance(value, torch.Tensor):
                raise WorkloadError(
                    f"layer {number} ({type(layer).__name__}) returns "
                    f"{with_article(type(value).__name__)}, but devices exchange tensors",
                    remedy="wrap it in a module that returns a tensor",
                )
            trains |= any(parameter.requires_grad for parameter in layer.parameters())
            messages.append(LayerMessage(value.shape, value.dtype, trains))
    for module, mode in modes:
        module.training = mode
    return messages
