"""Architecture search in the user's own network: its space, a supernet, estimates, the search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.nas.board_search import BoardResult, search_for_board
    from slipstream.nas.estimates import estimate
    from slipstream.nas.footprint import Footprint, Footprints
    from slipstream.nas.latency import predict_latency
    from slipstream.nas.searching import calibrate, fit, search
    from slipstream.nas.space import ArchitectureSpace, derive_space
    from slipstream.nas.supernet import Supernet

_HOMES = {
    "ArchitectureSpace": "space",
    "BoardResult": "board_search",
    "Footprint": "footprint",
    "Footprints": "footprint",
    "Supernet": "supernet",
    "calibrate": "searching",
    "derive_space": "space",
    "estimate": "estimates",
    "fit": "searching",
    "predict_latency": "latency",
    "search": "searching",
    "search_for_board": "board_search",
}

__all__ = [
    "ArchitectureSpace",
    "BoardResult",
    "Footprint",
    "Footprints",
    "Supernet",
    "calibrate",
    "derive_space",
    "estimate",
    "fit",
    "predict_latency",
    "search",
    "search_for_board",
]

__getattr__, __dir__ = late(__name__, _HOMES, __all__)
