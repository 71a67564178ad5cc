"""Analyses of a graph and its simulated step."""
