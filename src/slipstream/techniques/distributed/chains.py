"""Models that are chains of layers, for techniques that run the layers separately."""

from __future__ import annotations

import inspect
import itertools
import operator
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.fx._symbolic_trace import _assert_is_none

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
    """Yield names and layers of a model, in order.

    They are those of nested ``nn.Sequential`` containers. A model with another forward is traced;
    each of its layers begins with a call of a module before which only one tensor passes.

    Args:
        prefix: what the names begin with.

    Raises:
        WorkloadError: the model cannot be traced or is a single layer, or a container has hooks.
    """
    hooks = (model._forward_pre_hooks, model._forward_hooks, model._backward_hooks)
    if "forward" in vars(model) or model._compiled_call_impl is not None or any(hooks):
        raise WorkloadError(
            f"{technique} runs the layers separately, which would skip the hooks, autocast or "
            "compilation of their container",
            remedy=f"run {technique} without amp, compile and other techniques for the whole model",
        )
    if type(model) is not nn.Sequential:
        yield from _traced_layers(model, technique)
        return
    for name, layer in model._modules.items():
        if type(layer) is nn.Sequential:
            yield from chain(layer, technique, f"{prefix}{name}.")
        else:
            yield prefix + name, layer


class _Tracer(fx.Tracer):
    """Calls of blocks, and of layers outside them: modules without lists of modules are leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) is not nn.Sequential and not any(
            isinstance(inner, nn.ModuleList) for inner in m.modules()
        )


def _traced_layers(model: nn.Module, technique: str) -> Iterator[tuple[str, nn.Module]]:
    what = f"{technique} runs chains of layers, but the model is {type(model).__name__}"
    remedy = (
        "wrap its layers in nn.Sequential, or split it with torch.distributed.pipelining.pipeline"
    )
    optional = {
        name: parameter.default
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is not parameter.empty
    }
    try:
        graph = _Tracer().trace(model, concrete_args=optional)
    except Exception as error:  # of the user's forward
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WorkloadError(f"{what}, which cannot be traced: {reason}", remedy=remedy) from error
    # The trace checks that optional arguments have their defaults; a layer has none.
    for node in reversed(graph.nodes):
        checks = node.target is operator.eq and not node.users
        if checks or node.target in (torch._assert, _assert_is_none):
            graph.erase_node(node)
    # Parameters are read where they are used.
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    position = {node: at for at, node in enumerate(nodes)}
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node.users]
    ends = {
        node: max((position.get(user, len(nodes)) for user in node.users), default=-1)
        for node in (*inputs, *nodes)
    }
    # By position, the tensor that passes before it.
    starts: dict[int, Any] = {0: inputs[0] if inputs else None}
    passing, passed, latest = dict.fromkeys(inputs), None, 0
    for at, node in enumerate(nodes):
        passing = {value: None for value in passing if ends[value] >= at}
        # Not part of a tuple.
        if len(passing) == 1 and all(
            u.target is not operator.getitem for p in passing for u in p.users
        ):
            latest, passed = at, next(iter(passing))
        if node.op == "call_module" and latest:
            starts[latest], latest = passed, 0
        passing[node] = None
    if len(inputs) != 1 or len(starts) < 2:
        called = [str(n.target) for n in nodes if n.op == "call_module"]
        reason = f"several tensors pass between its modules {', '.join(called[:4])}"
        if len(inputs) != 1:
            reason = f"its forward reads {len(inputs)} tensors"
        elif len(called) < 2:
            reason = "its forward calls fewer than two modules"
        raise WorkloadError(f"{what}, which cannot be cut: {reason}", remedy=remedy)
    (result,) = (node.args[0] for node in graph.nodes if node.op == "output")
    for begin, end in itertools.pairwise([*starts, len(nodes)]):
        part = fx.Graph()
        copies = {starts[begin]: part.placeholder("x")}
        for node in nodes[begin:end]:
            for source in node.all_input_nodes:
                if source not in copies:
                    copies[source] = part.node_copy(source)
            copies[node] = part.node_copy(node, copies.__getitem__)
        part.output(fx.map_arg(starts.get(end, result), copies.__getitem__))
        called = [str(node.target) for node in nodes[begin:end] if node.op == "call_module"]
        yield called[0] if called else "", fx.GraphModule(model, part, type(model).__name__)


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
    """Return what follows each layer; mark layers that overwrite their input, for `writable`.

    Raises:
        WorkloadError: a layer returns something other than a tensor.
    """
    messages, trains = [], False
    modes = [(module, module.training) for layer in layers for module in layer.modules()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        value = x.clone()
        for number, layer in enumerate(layers):
            source, version = value, value._version
            value = layer.eval()(source)
            if source._version != version:
                vars(layer)["inplace"] = True
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
