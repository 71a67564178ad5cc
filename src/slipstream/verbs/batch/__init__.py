"""batch_model: a step's time and memory against its batch size, from a few measured sizes."""
