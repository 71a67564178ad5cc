"""Distances and neighbours over sparse rows."""
