"""Gradient exchange in slices by priority; see `wrapper.PriorityDDP` and `technique`."""
