"""Adaptive summation: speed, memory, and results of training."""
