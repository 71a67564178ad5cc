"""Schedules of affine loops, chosen by a learned cost model and verified by execution."""
