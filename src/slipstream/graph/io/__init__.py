"""File formats of graphs: ``.slipgraph``, Kineto and Chakra."""
