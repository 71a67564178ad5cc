"""Metadata of a graph, as JSON: machine, steps and workload.

A step may already use autocast, torch.compile or data parallelism. Techniques need to know, so as
not to offer it again, and not to judge a step by operators that they cannot see.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.compiling import compiled_already
from slipstream.capture.lines import describe_lines
from slipstream.capture.modules import ModuleNames, module_classes
from slipstream.capture.trace import Node
from slipstream.measure.facts_machine import UNREADABLE, facts

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload
    from slipstream.workload.lines import Chain

_FACTS = (
    "cpu.model", "cpu.physical", "cpu.logical", "memory.total_mib",
    "kernel.system", "kernel.release", "machine.container",
)  # fmt: skip
# Annotations of torch, visible also in a step that hides its model.
_COMPILED = ("Torch-Compiled Region", "CompiledFunction")
_WRAPPERS = {
    "DistributedDataParallel.forward": "DistributedDataParallel",
    "FullyShardedDataParallel.forward": "FullyShardedDataParallel",
    "FSDP::": "FullyShardedDataParallel",
}
# Time of a long step, in medians, and the least share of all time in such steps to mention them.
_LONG, _MIN_LONG_SHARE = 2.0, 0.1
_PLAIN = (bool, int, float, str, type(None))


def describe_capture(
    built: BuiltWorkload,
    names: ModuleNames,
    annotated: Sequence[Node],
    chains: Sequence[Chain],
    wall_ns: Sequence[int],
    cpu_ns: Sequence[int],
    *,
    spread_by_wall: bool = False,
) -> dict[str, Any]:
    """Describe the workload and its plain steps, on any device.

    Args:
        annotated: Nodes of the recorded step, see `describe_baseline`.
        chains: The user's lines behind its tasks, if known.
        wall_ns, cpu_ns: Times of each step without a profiler.
        spread_by_wall: Whether the spread of the steps is that of wall time, else of CPU time.
    """
    import torch

    wall, cpu = np.array(wall_ns, float), np.array(cpu_ns, float)
    lower, middle, upper = np.percentile(wall if spread_by_wall else cpu, [25, 50, 75])
    return {
        "workload": built.name,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "training": built.training,
        "machine": describe_machine(),
        "torch": torch.__version__,
        "optimizer": describe_optimizer(built.optimizer, built.other_optimizers),
        "parameters": 0
        if built.model is None
        else sum(p.numel() for p in built.model.parameters()),
        "modules": module_classes(built.model),
        "step_ns": {
            "wall_median": float(np.median(wall)),
            "wall_minimum": float(wall.min()),
            "cpu_median": float(np.median(cpu)),
            "cpu_minimum": float(cpu.min()),
            "relative_spread": float((upper - lower) / 2 / middle),
        },
        "inference_mode": names.inference_mode,
        "baseline": describe_baseline(built, annotated, names.autocast),
        "lines": describe_lines(built, chains),
        **_recursion(names),
        **({"evaluations": True} if built.evaluations else {}),
        **_loops(built),
        **_tokens(built),
    }


def describe_long_steps(times_ns: Sequence[float] | NDArray[np.float64]) -> dict[str, Any]:
    """Describe steps that take over twice the median, such as those before an evaluation."""
    times = np.array(times_ns, float)
    is_long = times > _LONG * np.median(times)
    share = float(times[is_long].sum() / max(times.sum(), 1.0))
    if share < _MIN_LONG_SHARE:
        return {}
    return {"long_steps": {"number": int(is_long.sum()), "of": len(times), "share": share}}


def _tokens(built: BuiltWorkload) -> dict[str, Any]:
    """Describe the labelled and padded tokens of the batch."""
    found = built.tokens.describe()
    return {"tokens": found} if found else {}


def _recursion(names: ModuleNames) -> dict[str, Any]:
    """Describe modules that call themselves, see `ModuleNames.calls`."""
    found = {name: calls for name, calls in names.calls.items() if any(calls)}
    return {"recursive": found} if found else {}


def _loops(built: BuiltWorkload) -> dict[str, Any]:
    if not built.other_loops:
        return {}
    return {"stepped_at": built.stepped_at, "other_loops": list(built.other_loops)}


def describe_machine() -> dict[str, Any]:
    """Describe processor, cores, memory, kernel and Python, named as in `Environment.facts`.

    Unreadable facts are left out. There are no names of hosts or users.
    """
    values = facts()
    readable = {name: values[name] for name in _FACTS if values[name] not in (None, UNREADABLE)}
    return readable | {"python.version": platform.python_version()}


def describe_baseline(built: BuiltWorkload, trace: Sequence[Node], autocast: str) -> dict[str, Any]:
    """Describe the techniques that the recorded step already uses, as JSON.

    Args:
        autocast: Dtype of modules under autocast, see `ModuleNames`.

    Returns:
        ``amp``: that dtype's name, or empty; ``compiled``: whether parts of the step are compiled;
        ``distributed``: the wrapper's class and ``ranks``, the number of processes, or ``None``.
    """
    names = {node.name for node in trace if node.call is None}
    compiled = any(name.startswith(_COMPILED) for name in names)
    if not compiled and built.model is not None:
        compiled = compiled_already(built.model)
    return {"amp": autocast, "compiled": compiled, "distributed": _distributed(names)}


def _distributed(names: set[str]) -> dict[str, Any] | None:
    import torch

    for prefix, wrapper in _WRAPPERS.items():
        if any(name.startswith(prefix) for name in names):
            ready = torch.distributed.is_available() and torch.distributed.is_initialized()
            ranks = torch.distributed.get_world_size() if ready else 1
            return {"wrapper": wrapper, "ranks": ranks}
    return None


def describe_optimizer(optimizer: Any, others: Sequence[Any] = ()) -> dict[str, Any] | None:
    """Describe class, settings and trained tensors of `optimizer` as JSON; None for inference.

    Tensors of `others` are included; ``differ`` is whether their class or settings differ.

    ``tensors`` has ``[dtype, shape, strides, device]`` of each parameter with a gradient. Settings
    that are not plain values (a learning rate that is a tensor) are left out. ``zeros`` has the
    share of exact zeros in each gradient, rounded to a tenth: square roots and divisions of zeros
    take several times as long as others.
    """
    if optimizer is None:
        return None
    trained = [
        p
        for each in (optimizer, *others)
        for group in each.param_groups
        for p in group["params"]
        if p.grad is not None or p.requires_grad
    ]
    tensors = [
        [str(p.dtype).removeprefix("torch."), list(p.shape), list(p.stride()), p.device.type]
        for p in trained
    ]
    kinds = [(type(each).__name__, _settings(each)) for each in (optimizer, *others)]
    return {
        "class": kinds[0][0],
        "settings": kinds[0][1],
        "tensors": tensors,
        "zeros": [_zeros(p.grad) for p in trained],
        "differ": any(_cost(*kind) != _cost(*kinds[0]) for kind in kinds),
    }


def _settings(optimizer: Any) -> dict[str, Any]:
    # Use the first group: groups that differ in learning rate or decay cost the same.
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    return {
        name: list(group[name]) if isinstance(group.get(name), tuple) else group.get(name)
        for name in optimizer.defaults
        if isinstance(group.get(name), (*_PLAIN, tuple))
    }


def _cost(kind: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what determines the cost of an update: its class and its flags."""
    return kind, {name: value for name, value in settings.items() if not isinstance(value, float)}


def _zeros(gradient: Any) -> float:
    if gradient is None or gradient.is_sparse or not gradient.numel():
        return 0.0
    return round(1 - int(gradient.count_nonzero()) / int(gradient.numel()), 1)
