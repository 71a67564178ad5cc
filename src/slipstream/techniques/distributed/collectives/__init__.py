"""Bandwidth-efficient collectives between processes: reduce-scatter, all-gather, 2-D all-reduce."""
