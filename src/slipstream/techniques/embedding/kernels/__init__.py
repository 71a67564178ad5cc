"""Operators of embedding tables: compiled kernels, their twins in torch, and Triton's."""
