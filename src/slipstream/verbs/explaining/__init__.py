"""explain and diff: what a recorded step consists of, and what made it slower or faster."""
