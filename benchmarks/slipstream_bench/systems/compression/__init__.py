"""Compressed gradients: encoders, real ranks, convergence, and when compression is worth it."""
