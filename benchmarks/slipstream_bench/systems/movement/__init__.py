"""Data movement: exact bytes, and savings of regions."""
