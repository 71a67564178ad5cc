"""Serving and training under MLPerf rules."""
