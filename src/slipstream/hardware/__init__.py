"""Accelerators that one can only describe."""
