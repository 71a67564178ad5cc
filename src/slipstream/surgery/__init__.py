"""Module surgery: find modules that belong together, and replace them."""
