"""State of a sharded optimizer: conversion between shards and whole tensors, and its memory."""

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
        """Sharded bytes relative to unsharded ones; 1 for an optimizer without state."""
        return self.sharded_bytes / self.unsharded_bytes if self.unsharded_bytes else 1.0

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.sharded_bytes)} of optimizer state instead of "
            f"{format_bytes(self.unsharded_bytes)}"
        )


def memory(
    state: Mapping[Any, Any], pieces: Mapping[int, torch.Tensor], parameters: Sequence[torch.Tensor]
) -> StateMemory:
    """Return the memory of `state`, which is keyed by slices."""
    sharded = whole = 0
    for p in parameters:
        piece = pieces[id(p)]
        for value in state.get(piece, {}).values():
            if not isinstance(value, torch.Tensor):
                continue
            sharded += value.numel() * value.element_size()
            whole += (
                p.numel() if _is_share(value, piece) else value.numel()
            ) * value.element_size()
    return StateMemory(sharded, whole)


def shard_state(
    state: dict[Any, Any], pieces: Mapping[int, torch.Tensor], parameters: Sequence[torch.Tensor],
    cut: _Slice,
) -> None:  # fmt: skip
    """Replace state of parameters by state of their slices, in place."""
    for p in parameters:
        if p in state:
            state[pieces[id(p)]] = _cut(state.pop(p), p, cut)


def full(
    state_dict: dict[str, Any], parameters: Sequence[torch.Tensor],
    assemble: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> dict[str, Any]:  # fmt: skip
    """Convert a state_dict of slices to one of parameters; `assemble` communicates, in order."""
    state = {}
    for number in sorted(state_dict["state"]):
        p = parameters[number]
        state[number] = {
            key: assemble(p, value) if _like_parameter(key, value) else _copy(value)
            for key, value in sorted(state_dict["state"][number].items())
        }
    return {"state": state, "param_groups": state_dict["param_groups"]}


def own_share(
    state_dict: Mapping[str, Any], parameters: Sequence[torch.Tensor], cut: _Slice, rank: int,
    ranks: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the part of a state_dict that this rank loads.

    Raises:
        InvalidArgumentError: it is from another rank or number of ranks, or not a state_dict.
    """
    if "state" not in state_dict or "param_groups" not in state_dict:
        raise InvalidArgumentError("state_dict", "it has no 'state' and 'param_groups'")
    saved = state_dict.get(KEY)
    remainder = {key: value for key, value in state_dict.items() if key != KEY}
    if saved is not None:
        if (saved["rank"], saved["ranks"]) != (rank, ranks):
            raise InvalidArgumentError(
                "state_dict",
                f"it is from rank {saved['rank']} of {saved['ranks']}; this is rank {rank} of "
                f"{ranks}",
                remedy="load each rank's own file; full_state_dict supports any number of ranks",
            )
        return remainder
    state = {}
    for number, values in state_dict["state"].items():
        if not 0 <= int(number) < len(parameters):
            raise InvalidArgumentError(
                "state_dict",
                f"it has a parameter {number}, but the optimizer has {len(parameters)}",
            )
        state[number] = _cut(values, parameters[int(number)], cut)
    return {**remainder, "state": state}


def _cut(values: Mapping[str, Any], p: torch.Tensor, cut: _Slice) -> dict[str, Any]:
    parts = {}
    for key, value in values.items():
        if not _like_parameter(key, value):
            parts[key] = value
            continue
        if value.shape != p.shape:
            raise InvalidArgumentError(
                "state_dict", f"'{key}' has the shape {list(value.shape)}, but the parameter has "
                f"{list(p.shape)}"
            )  # fmt: skip
        # Copy, since a view would keep the whole tensor alive.
        parts[key] = cut(p, value).clone()
    return parts


def _like_parameter(key: str, value: Any) -> bool:
    """Whether the value has one element per element of the parameter; torch's counters have not."""
    return isinstance(value, torch.Tensor) and key not in ("step", "mu_product")


def _is_share(value: torch.Tensor, piece: torch.Tensor) -> bool:
    return value.shape == piece.shape and value.dim() == 1


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
