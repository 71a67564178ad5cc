"""Fused dropout: speed and randomness."""
