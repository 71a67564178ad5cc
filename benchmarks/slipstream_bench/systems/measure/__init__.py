"""The measuring itself: coverage, power, drift."""
