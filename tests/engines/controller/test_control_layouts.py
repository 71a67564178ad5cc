"""Pieces of a transfer add up to the target layout, whatever the layouts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engines.controller import REPLICATED, sharded
from slipstream.engines.controller.layout import pieces

LAYOUTS = st.sampled_from([REPLICATED, sharded(0), sharded(1)])
HOSTS = st.sampled_from([[0], [0, 0], [0, 1], [1, 1, 2], [0, 0, 1, 1, 2, 2]])


@given(LAYOUTS, HOSTS, LAYOUTS, HOSTS)
def test_pieces_cover_every_target_exactly_once(source, hosts, target, onto) -> None:  # type: ignore[no-untyped-def]
    shape = (12, 6)
    whole = torch.arange(72).reshape(shape)
    written = [torch.full(shape, -1) for _ in onto]
    for piece in pieces(shape, source, hosts, target, onto):
        holder = source.box(shape, len(hosts), piece.source)
        assert all(
            outer.start <= own.start and own.stop <= outer.stop
            for own, outer in zip(piece.box, holder, strict=True)
        )
        assert (written[piece.target][piece.box] == -1).all()
        written[piece.target][piece.box] = whole[piece.box]
    for device, found in enumerate(written):
        box = target.box(shape, len(onto), device)
        assert torch.equal(found[box], whole[box])


def test_replicas_are_copied_within_the_host() -> None:
    found = [piece.source for piece in pieces((4,), REPLICATED, [0, 1], REPLICATED, [1, 1, 0])]
    assert found == [1, 1, 0]
