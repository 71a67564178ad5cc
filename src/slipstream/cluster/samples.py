"""Communications that were timed: what a cluster's links are fitted to."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTING = ("alone", "beside")
"""Kinds of operations that are told by the time of computing."""


@dataclass(frozen=True)
class Operation:
    """What to time.

    Attributes:
        kind: ``p2p`` (there and back), ``all_reduce``, ``all_gather``, ``reduce_scatter``,
            ``2d``: over two rows of ranks; or ``add``: every rank adds up that many bytes, and
            nothing is sent. Of `COMPUTING` the time of some products of matrices is told, which
            all ranks compute ``alone``, or ``beside`` all-reduces of that many bytes.
        nbytes: S, as `Collective.nbytes`.
        ranks: who takes part.
        repeats: timed, after `warmup` that are not.
        pause_ns: how long each rank sleeps first, as if it computed; part of the time.
        in_a_row: how often it is done at a stretch, the time of one being told. A token bucket has
            saved up before the first and lets its burst pass at once; many show the link's rate.
    """

    kind: str
    nbytes: int
    ranks: tuple[int, ...]
    repeats: int = 9
    pause_ns: float = 0.0
    in_a_row: int = 1
    warmup: int = 2


@dataclass(frozen=True)
class Sample:
    """What was timed, and how long it took.

    Attributes:
        duration_ns: median over repeats of the slowest rank's time; one way for ``p2p``.
        repeats_ns: every repeat.
        began_ns: when each began, by the clock that all processes of a machine share.
    """

    operation: Operation
    duration_ns: float
    repeats_ns: tuple[float, ...]
    began_ns: tuple[float, ...] = ()
