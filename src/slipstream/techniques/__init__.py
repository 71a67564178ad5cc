"""All techniques, which the registry in `slipstream.technique` finds."""
