"""The graph: exactness, capture, and a peer."""
