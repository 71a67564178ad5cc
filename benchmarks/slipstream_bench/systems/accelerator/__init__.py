"""`slipstream bench accelerator`."""
