"""Gradient communication in order of urgency."""
