"""Spatial partitioning of convolutions, batch-norm groups, evaluation and input on many hosts."""
