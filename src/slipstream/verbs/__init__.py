"""The verbs of the flow: what ``ss.profile(...)`` and the commands call."""
