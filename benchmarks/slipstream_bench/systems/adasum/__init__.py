"""Adaptive summation: speed, memory, and how far training gets."""
