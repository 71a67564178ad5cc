"""Sums in the network."""
