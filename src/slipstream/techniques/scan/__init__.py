"""Recurrences whose backward pass is one loop, chunks, or a tree of Jacobians.

Names are imported on first use, so that the technique predicts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.techniques.scan.affine import exclusive_scan, linear_recurrence
    from slipstream.techniques.scan.jacobians import ChainGradient, backprop, jacobian_transposed
    from slipstream.techniques.scan.nn import GRU, LSTM, RNN, rnn

_HOMES = {
    "affine": ("exclusive_scan", "linear_recurrence"),
    "jacobians": ("ChainGradient", "backprop", "jacobian_transposed"),
    "nn": ("GRU", "LSTM", "RNN", "rnn"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "GRU", "LSTM", "RNN", "ChainGradient", "backprop", "exclusive_scan", "jacobian_transposed",
    "linear_recurrence", "rnn",
]  # fmt: skip

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)

MARGIN = 1.05
"""Minimum speed-up of torch's recurrence over the others to be chosen: it saves more memory, whose
first touch repeated timing does not include."""
