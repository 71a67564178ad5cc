"""Removal of redundant units, and ensembles whose members cost less than separate trainings.

Names are imported on first use, so that the technique predicts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.techniques.ensembles.compaction import (
        CompactionResult,
        LayerRedundancy,
        compact,
        redundancy,
    )
    from slipstream.techniques.ensembles.members import (
        Bin,
        Ensemble,
        Quality,
        calibration,
        detection,
        evaluate,
    )
    from slipstream.techniques.ensembles.stacking import StackedEnsemble, stack
    from slipstream.techniques.ensembles.training import (
        EnsembleComparison,
        MethodResult,
        build,
        compare,
    )

_HOMES = {
    "members": ("Bin", "Ensemble", "Quality", "calibration", "detection", "evaluate"),
    "compaction": ("CompactionResult", "LayerRedundancy", "compact", "redundancy"),
    "stacking": ("StackedEnsemble", "stack"),
    "training": ("EnsembleComparison", "MethodResult", "build", "compare"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Bin",
    "CompactionResult",
    "Ensemble",
    "EnsembleComparison",
    "LayerRedundancy",
    "MethodResult",
    "Quality",
    "StackedEnsemble",
    "build",
    "calibration",
    "compact",
    "compare",
    "detection",
    "evaluate",
    "redundancy",
    "stack",
]  # fmt: skip

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
