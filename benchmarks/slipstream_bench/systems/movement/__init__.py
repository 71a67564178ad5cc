"""Data movement: exact bytes, and what regions save."""
