"""Replace parameters of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.errors import WorkloadError


def exchange_parameters(optimizer: Any, old: Sequence[Any], *new: Any) -> None:
    """Let `optimizer` train `new` instead of `old`, in the group of the first of them.

    The state of `old` is dropped. If it trains none of them, nothing changes.

    Args:
        optimizer: a ``torch.optim.Optimizer``.
        old: parameters that the model no longer has.
        new: parameters that replace them.

    Raises:
        WorkloadError: they are in groups with different settings.
    """
    old_ids = {id(parameter) for parameter in old}
    groups = [g for g in optimizer.param_groups if any(id(p) in old_ids for p in g["params"])]
    settings = [{key: g[key] for key in g if key != "params"} for g in groups]
    if any(other != settings[0] for other in settings[1:]):
        raise WorkloadError(
            "the optimizer has different settings for parameters that become one",
            remedy="put them in one parameter group",
        )
    for number, group in enumerate(groups):
        retained = [p for p in group["params"] if id(p) not in old_ids]
        if number == 0:
            place = next(i for i, p in enumerate(group["params"]) if id(p) in old_ids)
            before = [p for p in group["params"][:place] if id(p) not in old_ids]
            retained = [*before, *new, *retained[len(before) :]]
        group["params"] = retained
    for parameter in old:
        optimizer.state.pop(parameter, None)
