"""Embedding tables: kernels, memory, quality."""
