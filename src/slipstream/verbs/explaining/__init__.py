"""explain and diff: a recorded step's contents, and the causes of a change."""
