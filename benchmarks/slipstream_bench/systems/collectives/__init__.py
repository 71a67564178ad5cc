"""Two-dimensional all-reduce and sharded updates."""
