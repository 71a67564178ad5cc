"""Low-bit layers: kernels, networks, predictions."""
