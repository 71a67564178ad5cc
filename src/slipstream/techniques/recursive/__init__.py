"""Recursive models over trees and acyclic graphs, compiled to one kernel call per request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.techniques.recursive.net import Passes, RecursiveNet, RecursiveOutput, compile
    from slipstream.techniques.recursive.structures import (
        Linearized,
        Linearizer,
        StructureError,
        Structures,
        nested,
    )
    from slipstream.techniques.recursive.traced import RecursiveModelError

_HOMES = {
    "net": ("Passes", "RecursiveNet", "RecursiveOutput", "compile"),
    "structures": ("Linearized", "Linearizer", "StructureError", "Structures", "nested"),
    "traced": ("RecursiveModelError",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Linearized", "Linearizer", "Passes", "RecursiveModelError", "RecursiveNet", "RecursiveOutput",
    "StructureError", "Structures", "compile", "nested",
]  # fmt: skip

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
