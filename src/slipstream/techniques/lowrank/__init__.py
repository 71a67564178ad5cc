"""Weights as products of two thin matrices, from the first step or after a dense warm-up.

Modules are imported on first use, because the technique predicts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.techniques.lowrank.factors import Factors, Start, truncate
    from slipstream.techniques.lowrank.layers import (
        FactorizedLayer,
        Report,
        factorize,
        merge,
        plan,
        switch,
    )
    from slipstream.techniques.lowrank.monitor import RankMonitor
    from slipstream.techniques.lowrank.nn import (
        LowRankAttention,
        LowRankConv1d,
        LowRankConv2d,
        LowRankLinear,
        LowRankLSTM,
    )
    from slipstream.techniques.lowrank.technique import LowRank

_HOMES = {
    "layers": ("FactorizedLayer", "Report", "factorize", "merge", "plan", "switch"),
    "factors": ("Factors", "Start", "truncate"),
    "monitor": ("RankMonitor",),
    "nn": ("LowRankAttention", "LowRankConv1d", "LowRankConv2d", "LowRankLSTM", "LowRankLinear"),
    "technique": ("LowRank",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "FactorizedLayer",
    "Factors",
    "LowRank",
    "LowRankAttention",
    "LowRankConv1d",
    "LowRankConv2d",
    "LowRankLSTM",
    "LowRankLinear",
    "RankMonitor",
    "Report",
    "Start",
    "factorize",
    "merge",
    "plan",
    "switch",
    "truncate",
]

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
