"""What an exchange asks of its process group: collectives, one after another."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Reduce:
    """A tensor to be added up over workers, in place."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Gather:
    """Bytes, uint8 [n], that everybody is to have of everybody: sent back as [workers, n]."""

    tensor: torch.Tensor


Exchange = Generator[Reduce | Gather, "torch.Tensor", bool]
"""Yields what is to be communicated, is sent the answer, and returns whether it is sound."""
