"""Search for cheaper compositions of torch's functions, and replace subgraphs by them."""
