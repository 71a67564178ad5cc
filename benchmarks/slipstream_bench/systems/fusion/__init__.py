"""Fused regions: speed compared with eager and torch.compile, and equal numerics."""
