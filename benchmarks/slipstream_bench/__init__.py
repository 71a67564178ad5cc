"""Benchmarks of slipstream: what each row measures, its target, and recorded results."""

import os

# ONNX Runtime, which some benches compare with, reads this on import: no telemetry.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
