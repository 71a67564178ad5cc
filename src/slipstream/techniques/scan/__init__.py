"""Recurrences whose backward is one loop, chunks, or a tree of Jacobians: what is fastest here.

Imported on first use: the technique itself predicts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.techniques.scan.affine import exclusive_scan, linear_recurrence
    from slipstream.techniques.scan.nn import GRU, LSTM, RNN, rnn

_HOMES = {
    "affine": ("exclusive_scan", "linear_recurrence"),
    "nn": ("GRU", "LSTM", "RNN", "rnn"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["GRU", "LSTM", "RNN", "exclusive_scan", "linear_recurrence", "rnn"]

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)

MARGIN = 1.05
"""By how many times torch's own way has to be the faster one to be taken: it keeps more memory,
whose first touch a timing in a loop does not see."""
