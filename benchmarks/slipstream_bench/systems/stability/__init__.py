"""Stability across devices: EfficientNet-Lite0 over phones, and hardened networks."""
