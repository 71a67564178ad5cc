"""The graph: exactness, capture, and a comparison with a peer."""
