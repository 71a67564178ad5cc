"""prove: a step with and without techniques, measured side by side, quality beside speed."""
