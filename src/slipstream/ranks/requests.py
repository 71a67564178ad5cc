"""Requests of an exchange to its process group: a sequence of collectives."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Reduce:
    """Sum a tensor over workers, in place."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Gather:
    """Gather bytes, uint8 [n], of all workers; the answer is [workers, n]."""

    tensor: torch.Tensor


Exchange = Generator[Reduce | Gather, "torch.Tensor", bool]
"""Yields requests, is sent the answers, and returns whether the result is valid."""
