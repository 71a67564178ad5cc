"""Dropout in one pass over memory, without a mask."""
