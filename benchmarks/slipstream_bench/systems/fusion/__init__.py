"""Fused regions: speed against eager and torch.compile, and the same numbers."""
