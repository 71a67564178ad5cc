"""Recursive models over trees and acyclic graphs, compiled to one kernel call per request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.techniques.recursive.calls import compile_calls
    from slipstream.techniques.recursive.cells import (
        DAGRNN,
        MVRNN,
        Cell,
        ChildSumTreeLSTM,
        SequenceGRU,
        SequenceLSTM,
        SimpleTreeGRU,
        TreeFC,
        TreeGRU,
        TreeLSTM,
        TreeNode,
        TreeRNN,
    )
    from slipstream.techniques.recursive.explaining import Explanation
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
    "calls": ("compile_calls",),
    "cells": (
        "Cell",
        "ChildSumTreeLSTM",
        "DAGRNN",
        "MVRNN",
        "SequenceGRU",
        "SequenceLSTM",
        "SimpleTreeGRU",
        "TreeFC",
        "TreeGRU",
        "TreeLSTM",
        "TreeNode",
        "TreeRNN",
    ),
    "explaining": ("Explanation",),
    "net": ("Passes", "RecursiveNet", "RecursiveOutput", "compile"),
    "structures": ("Linearized", "Linearizer", "StructureError", "Structures", "nested"),
    "traced": ("RecursiveModelError",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DAGRNN",
    "MVRNN",
    "Cell",
    "ChildSumTreeLSTM",
    "Explanation",
    "Linearized",
    "Linearizer",
    "Passes",
    "RecursiveModelError",
    "RecursiveNet",
    "RecursiveOutput",
    "SequenceGRU",
    "SequenceLSTM",
    "SimpleTreeGRU",
    "StructureError",
    "Structures",
    "TreeFC",
    "TreeGRU",
    "TreeLSTM",
    "TreeNode",
    "TreeRNN",
    "compile",
    "compile_calls",
    "nested",
]

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
