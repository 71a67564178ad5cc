"""Orders in which slices are sent, on which all ranks agree without waiting for each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from slipstream.techniques.distributed.priority.channel import Agreed, Half, control_tag
from slipstream.techniques.distributed.priority.layout import Slice


class Leader:
    """Rank 0 sends its most urgent slice and tells the others which it is.

    The message travels while the slices before are still on their way.
    """

    def __init__(self) -> None:
        # What is being sent must not be freed: kept until the end of the next round.
        self._said: list[object] = []

    def picks(self, channel: Agreed) -> Iterator[tuple[Slice, Half]]:
        """See `Order`."""
        ranks, tag = channel.ranks, control_tag(channel.slices)
        others = range(1, ranks.size)
        told = torch.zeros(1, dtype=torch.int32)
        works: list[object] = []
        for _ in channel.slices:
            if ranks.rank == 0:
                one = channel.most_urgent()
                said = torch.tensor([one.number], dtype=torch.int32)
                works += [
                    (said, dist.isend(said, group_dst=peer, group=ranks.group, tag=tag))
                    for peer in others
                ]
            else:
                dist.recv(told, group_src=0, group=ranks.group, tag=tag)
                one = channel.slices[int(told)]
                channel.until_ready(one)
            yield one, Half.BOTH
        self._said = works


class Static:
    """One order for all rounds, found by simulating one."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = list(order)

    def picks(self, channel: Agreed) -> Iterator[tuple[Slice, Half]]:
        """See `Order`."""
        for number in self.order:
            one = channel.slices[number]
            channel.until_ready(one)
            channel.until_room()
            yield one, Half.BOTH


class Decoupled:
    """All first halves as gradients become ready, then all second halves as they are needed.

    Source: decoupled all-reduce as in Zhang et al., DeAR, ICDCS 2023, 2302.12445.
    """

    def __init__(self, released: Sequence[int]) -> None:
        self.released = list(released)

    def picks(self, channel: Agreed) -> Iterator[tuple[Slice, Half]]:
        """See `Order`."""
        for number in self.released:
            one = channel.slices[number]
            channel.until_ready(one)
            channel.until_room()
            yield one, Half.SCATTER
        for one in channel.slices:
            channel.until_scattered(one)
            channel.until_room()
            yield one, Half.GATHER
