"""Timed communications, to which a cluster's links are fitted."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTING = ("alone", "beside")
"""Kinds of operations whose computing time is reported."""


@dataclass(frozen=True)
class Operation:
    """An operation to time.

    Attributes:
        kind: ``p2p`` (there and back), ``all_reduce``, ``all_gather``, ``reduce_scatter``,
            ``2d``: over two rows of ranks; or ``add``: every rank sums `nbytes`, and nothing is
            sent. For `COMPUTING`, the time of some matmuls that all ranks compute, ``alone`` or
            ``beside`` all-reduces of `nbytes`.
        nbytes: S, as `Collective.nbytes`.
        ranks: participating ranks.
        repeats: number of timed repeats, after `warmup` untimed ones.
        pause_ns: time that each rank sleeps first, as if it computed; part of the duration.
        in_a_row: number of consecutive runs, whose mean is reported. A token bucket that has
            filled up lets a first burst pass immediately; many runs show the link's rate.
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
    """A timed operation with its duration.

    Attributes:
        duration_ns: median over repeats of the slowest rank's time; one way for ``p2p``.
        repeats_ns: every repeat.
        began_ns: start of each, by the clock that all processes of a machine share.
    """

    operation: Operation
    duration_ns: float
    repeats_ns: tuple[float, ...]
    began_ns: tuple[float, ...] = ()
