"""Messages between the processes of a group, and how many bytes this one sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slipstream.errors import InvalidArgumentError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""What can be exchanged."""


@dataclass
class Wire:
    """A group of processes, and what this one sent to the others.

    Attributes:
        payload_bytes: of tensors.
        product_bytes: of small sums, before they are all-reduced.
        timeout: of groups that are made of some of its ranks; None: torch's default.
        aligned: by size, the contiguous groups of ranks that this one is in, once they are made.
    """

    group: Any
    rank: int
    size: int
    payload_bytes: int = 0
    product_bytes: int = 0
    timeout: timedelta | None = None
    aligned: dict[int, Any] = field(default_factory=dict, repr=False)
    _kept: torch.Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(cls, group: Any = None) -> Wire:
        """The processes of a group; None: all."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory to receive in, the same at every call: its pages are there already."""
        kept = self._kept
        if kept is None or kept.dtype != dtype or kept.numel() < count:
            kept = self._kept = torch.empty(count, dtype=dtype)
        return kept[:count]

    def post(
        self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor], tag: int = 0
    ) -> dict[int, Any]:
        """Begin to send and receive contiguous tensors, by rank in the group; empty ones stay.

        Returns:
            What to wait for: by rank what comes from it, and under ``-1 - rank`` what goes there.
        """
        works: dict[int, Any] = {}
        for peer, tensor in received.items():
            if tensor.numel():
                works[peer] = dist.irecv(tensor, group_src=peer, group=self.group, tag=tag)
        for peer, tensor in sent.items():
            if tensor.numel():
                works[-1 - peer] = dist.isend(tensor, group_dst=peer, group=self.group, tag=tag)
                self.payload_bytes += tensor.numel() * tensor.element_size()
        return works

    def swap(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        wait(list(self.post(sent, received).values()))

    def add_up(self, products: Any) -> Any:
        """The sum over ranks of float64 [...]."""
        total = torch.from_numpy(products)
        dist.all_reduce(total, group=self.group)
        self.product_bytes += total.numel() * 8
        return total.numpy()


def wait(works: Sequence[Any]) -> None:
    """Until all of these messages have gone or come."""
    for work in works:
        work.wait()


def need_dense(tensor: Any, argument: str = "tensor") -> torch.Tensor:
    """`tensor`, if its numbers can be exchanged.

    Raises:
        InvalidArgumentError: it is none, or not dense, floating and on a processor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(argument, f"is a {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES or tensor.device.type != "cpu":
        raise InvalidArgumentError(
            argument, f"it is {tensor.dtype}, {tensor.layout}, on {tensor.device}",
            remedy="dense float32, float64, float16 or bfloat16 on a processor",
        )  # fmt: skip
    return tensor
