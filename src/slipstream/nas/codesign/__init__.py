"""Joint search of a network and the hardware that it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.nas.codesign.chips import ChipSpace
    from slipstream.nas.codesign.layers import NetworkLayer, network_layers
    from slipstream.nas.codesign.processor import ProcessorSpace
    from slipstream.nas.codesign.searching import Codesign, Pair, search

_HOMES = {
    "ChipSpace": "chips",
    "Codesign": "searching",
    "NetworkLayer": "layers",
    "Pair": "searching",
    "ProcessorSpace": "processor",
    "network_layers": "layers",
    "search": "searching",
}

__all__ = [
    "ChipSpace",
    "Codesign",
    "NetworkLayer",
    "Pair",
    "ProcessorSpace",
    "network_layers",
    "search",
]

__getattr__, __dir__ = late(__name__, _HOMES, __all__)
