"""Give an optimizer other parameters than it was made with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.errors import WorkloadError


def exchange_parameters(optimizer: Any, old: Sequence[Any], *new: Any) -> None:
    """Let `optimizer` train `new` where it trained `old`, in the group of the first of them.

    What it remembers of `old` is dropped. Nothing happens where it trains none of them.

    Args:
        optimizer: a ``torch.optim.Optimizer``.
        old: parameters that the model no longer has.
        new: the parameters that come in their place.

    Raises:
        WorkloadError: they are in groups with different settings.
    """
    gone = {id(parameter) for parameter in old}
    groups = [g for g in optimizer.param_groups if any(id(p) in gone for p in g["params"])]
    settings = [{key: g[key] for key in g if key != "params"} for g in groups]
    if any(other != settings[0] for other in settings[1:]):
        raise WorkloadError(
            "the optimizer has different settings for parameters that become one",
            remedy="put them in one parameter group",
        )
    for number, group in enumerate(groups):
        kept = [p for p in group["params"] if id(p) not in gone]
        if number == 0:
            place = next(i for i, p in enumerate(group["params"]) if id(p) in gone)
            before = [p for p in group["params"][:place] if id(p) not in gone]
            kept = [*before, *new, *kept[len(before) :]]
        group["params"] = kept
    for parameter in old:
        optimizer.state.pop(parameter, None)
