"""What is told of source lines, in the editor."""
