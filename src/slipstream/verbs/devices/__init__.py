"""predict_device: the recorded step on other devices."""
