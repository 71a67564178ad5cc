"""The state of a sharded optimizer: its shares, the whole of them, and how much memory that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.units import format_bytes

KEY = "sharded_update"
_Slice = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StateMemory:
    """Bytes of an optimizer's state: on this rank, and unsharded."""

    sharded_bytes: int
    unsharded_bytes: int

    @property
    def share(self) -> float:
        """What is left of it; 1 for an optimizer without state."""
        return self.sharded_bytes / self.unsharded_bytes if self.unsharded_bytes else 1.0

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.sharded_bytes)} of optimizer state instead of "
            f"{format_bytes(self.unsharded_bytes)}"
        )


def memory(
    state: Mapping[Any, Any], pieces: Mapping[int, torch.Tensor], parameters: Sequence[torch.Tensor]
) -> StateMemory:
    """What `state`, by slices, takes."""
    mine = whole = 0
    for p in parameters:
        piece = pieces[id(p)]
        for value in state.get(piece, {}).values():
            if not isinstance(value, torch.Tensor):
                continue
            mine += value.numel() * value.element_size()
            whole += (
                p.numel() if _is_share(value, piece) else value.numel()
            ) * value.element_size()
    return StateMemory(mine, whole)


def shard_state(
    state: dict[Any, Any], pieces: Mapping[int, torch.Tensor], parameters: Sequence[torch.Tensor],
    cut: _Slice,
) -> None:  # fmt: skip
    """Let what an optimizer kept by parameters be kept by slices, and no more."""
    for p in parameters:
        if p in state:
            state[pieces[id(p)]] = _cut(state.pop(p), p, cut)


def full(
    found: dict[str, Any], parameters: Sequence[torch.Tensor],
    together: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> dict[str, Any]:  # fmt: skip
    """A state_dict of slices as one of parameters; `together` communicates, in one order."""
    state = {}
    for number in sorted(found["state"]):
        p = parameters[number]
        state[number] = {
            key: together(p, value) if _like_parameter(key, value) else _copy(value)
            for key, value in sorted(found["state"][number].items())
        }
    return {"state": state, "param_groups": found["param_groups"]}


def own_share(
    given: Mapping[str, Any], parameters: Sequence[torch.Tensor], cut: _Slice, rank: int,
    ranks: int,
) -> dict[str, Any]:  # fmt: skip
    """What of a state_dict this rank goes on with.

    Raises:
        InvalidArgumentError: it is another rank's, or of another number of ranks, or no state.
    """
    if "state" not in given or "param_groups" not in given:
        raise InvalidArgumentError("state_dict", "it is no optimizer's")
    saved = given.get(KEY)
    rest = {key: value for key, value in given.items() if key != KEY}
    if saved is not None:
        if (saved["rank"], saved["ranks"]) != (rank, ranks):
            raise InvalidArgumentError(
                "state_dict",
                f"it is that of rank {saved['rank']} of {saved['ranks']}; this is rank {rank} of "
                f"{ranks}",
                remedy="every rank loads its own; full_state_dict goes on with any number",
            )
        return rest
    state = {}
    for number, values in given["state"].items():
        if not 0 <= int(number) < len(parameters):
            raise InvalidArgumentError(
                "state_dict", f"it has a parameter {number}, and there are {len(parameters)}"
            )
        state[number] = _cut(values, parameters[int(number)], cut)
    return {**rest, "state": state}


def _cut(values: Mapping[str, Any], p: torch.Tensor, cut: _Slice) -> dict[str, Any]:
    parts = {}
    for key, value in values.items():
        if not _like_parameter(key, value):
            parts[key] = value
            continue
        if value.shape != p.shape:
            raise InvalidArgumentError(
                "state_dict", f"'{key}' has the shape {list(value.shape)} beside a parameter of "
                f"{list(p.shape)}"
            )  # fmt: skip
        # A copy: a view would keep the whole alive.
        parts[key] = cut(p, value).clone()
    return parts


def _like_parameter(key: str, value: Any) -> bool:
    """Whether there is one number for each of the parameter's; of torch's, all but counts."""
    return isinstance(value, torch.Tensor) and key not in ("step", "mu_product")


def _is_share(value: torch.Tensor, piece: torch.Tensor) -> bool:
    return value.shape == piece.shape and value.dim() == 1


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
