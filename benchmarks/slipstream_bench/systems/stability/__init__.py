"""Stability across devices: EfficientNet-Lite0 over phones, and networks that are hardened."""
