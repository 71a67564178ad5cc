"""Smaller networks with the same outputs, and ensembles whose members start from one of them."""

from slipstream.techniques.ensembles.members import Ensemble, Quality, build, evaluate
from slipstream.techniques.ensembles.redundancy import (
    Compacted,
    LayerRedundancy,
    compact,
    redundancy,
)

__all__ = [
    "Compacted",
    "Ensemble",
    "LayerRedundancy",
    "Quality",
    "build",
    "compact",
    "evaluate",
    "redundancy",
]
