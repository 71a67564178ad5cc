"""The cluster simulation: exactness, speed, and peers."""
