"""Small tasks on real data, one per file; their targets are set by recorded reference runs."""
