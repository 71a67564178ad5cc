"""Adasum: gradients or updates of many workers combined so that the learning rate may stay."""
