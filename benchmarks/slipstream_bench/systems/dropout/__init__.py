"""Fused dropout: how fast, and how random."""
