"""Subgraphs of a model replaced by cheaper compositions of torch's functions, found by search."""
