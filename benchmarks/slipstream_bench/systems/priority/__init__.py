"""Gradients in order of urgency."""
