"""Predicted step times compared with measured ones."""
