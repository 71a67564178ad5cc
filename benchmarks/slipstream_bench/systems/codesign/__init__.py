"""`slipstream bench codesign`."""
