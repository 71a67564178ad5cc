"""What a step has already: autocast, torch.compile, replicas that exchange gradients.

Techniques must know, so as not to offer it twice, nor judge a step by operators they cannot see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipstream.capture.compiling import compiled_already
from slipstream.capture.trace import Node

if TYPE_CHECKING:
    from slipstream.workload import Built

# What torch annotates, so that it is also seen in a step that hides its model.
_COMPILED = ("Torch-Compiled Region", "CompiledFunction")
_WRAPPERS = {
    "DistributedDataParallel.forward": "DistributedDataParallel",
    "FullyShardedDataParallel.forward": "FullyShardedDataParallel",
    "FSDP::": "FullyShardedDataParallel",
}


def describe_baseline(built: Built, trace: Sequence[Node], autocast: str) -> dict[str, Any]:
    """What the recorded step has already, as JSON.

    Args:
        autocast: the dtype that modules ran with under autocast, see `ModuleNames`.

    Returns:
        ``amp``: that dtype's name, or empty; ``compiled``: whether parts of the step went through
        torch.compile; ``distributed``: the wrapper's class and ``ranks``, the number of processes,
        or ``None``.
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
