"""Files a graph is read from and written to: our own, Kineto's and Chakra's."""
