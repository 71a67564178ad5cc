"""The bars slipstream is held to: what each row is, how it is measured, and what was recorded."""
