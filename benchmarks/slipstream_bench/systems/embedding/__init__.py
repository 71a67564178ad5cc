"""Embedding tables: kernels, memory and quality."""
