"""Independent kernels side by side: what waits for memory beside what computes."""
