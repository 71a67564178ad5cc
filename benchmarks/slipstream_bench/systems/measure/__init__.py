"""The measurement package: coverage, power, drift."""
