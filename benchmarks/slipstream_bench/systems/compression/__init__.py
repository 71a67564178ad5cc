"""Compressed gradients: encoders, real ranks, convergence, when they pay."""
