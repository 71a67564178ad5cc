"""Recurrences whose backward is one loop, chunks, or a tree of Jacobians: what is fastest here."""

from slipstream.techniques.scan.affine import exclusive_scan, linear_recurrence
from slipstream.techniques.scan.nn import GRU, LSTM, RNN, rnn

__all__ = ["GRU", "LSTM", "RNN", "exclusive_scan", "linear_recurrence", "rnn"]
