"""The cluster model: exactness, speed, and peers."""
