"""Edits of the user's source by syntax tree, as unified diffs."""
