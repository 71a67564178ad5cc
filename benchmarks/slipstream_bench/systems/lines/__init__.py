"""Costs of source lines, in the editor."""
