"""Collectives between processes that send what they should: reduce-scatter, all-gather, 2-D."""
