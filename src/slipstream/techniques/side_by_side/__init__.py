"""Fusion of independent kernels: memory-bound ones next to compute-bound ones."""
