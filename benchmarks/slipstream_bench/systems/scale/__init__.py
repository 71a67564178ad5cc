"""Steps on many chips, predicted and published."""
