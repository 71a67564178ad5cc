"""Gradients in slices, the most urgent first: see `wrapper.PriorityDDP` and `technique`."""
