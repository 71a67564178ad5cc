"""Messages between the processes of a group, with counts of the bytes sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slipstream.errors import InvalidArgumentError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Supported dtypes."""


@dataclass
class Wire:
    """A group of processes, and the bytes that this one sent.

    Attributes:
        payload_bytes: of tensors.
        product_bytes: of small sums, before they are all-reduced.
        timeout: of groups of a subset of its ranks; None for torch's default.
        aligned: contiguous groups with this rank, by size, once they are created.
    """

    group: Any
    rank: int
    size: int
    payload_bytes: int = 0
    product_bytes: int = 0
    timeout: timedelta | None = None
    aligned: dict[int, Any] = field(default_factory=dict, repr=False)
    _buffer: torch.Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(cls, group: Any = None) -> Wire:
        """Return the wire of a group; None for the default group."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a receive buffer, reused between calls to avoid page faults."""
        buffer = self._buffer
        if buffer is None or buffer.dtype != dtype or buffer.numel() < count:
            buffer = self._buffer = torch.empty(count, dtype=dtype)
        return buffer[:count]

    def post(
        self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor], tag: int = 0
    ) -> dict[int, Any]:
        """Start to send and receive contiguous tensors, by rank in the group; skips empty ones.

        Returns:
            Pending messages: from a rank under ``rank``, to a rank under ``-1 - rank``.
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
        """Return the sum over ranks of float64 [...]."""
        total = torch.from_numpy(products)
        dist.all_reduce(total, group=self.group)
        self.product_bytes += total.numel() * 8
        return total.numpy()


def wait(works: Sequence[Any]) -> None:
    """Wait until all messages are sent or received."""
    for work in works:
        work.wait()


def need_dense(tensor: Any, argument: str = "tensor") -> torch.Tensor:
    """Return `tensor` if it can be exchanged.

    Raises:
        InvalidArgumentError: it is not a dense floating-point tensor on the CPU.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(argument, f"is a {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES or tensor.device.type != "cpu":
        raise InvalidArgumentError(
            argument, f"it is {tensor.dtype}, {tensor.layout}, on {tensor.device}",
            remedy="pass a dense float32, float64, float16 or bfloat16 tensor on the CPU",
        )  # fmt: skip
    return tensor
