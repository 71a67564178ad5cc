"""prove: measure speed and quality of a step with and without techniques, side by side."""
