"""Regions of the user's own model in kernels generated for them."""
