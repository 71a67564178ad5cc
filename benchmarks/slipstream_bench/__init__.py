"""The bars slipstream is held to: what each row is, how it is measured, and what was recorded."""

import os

# Obeyed at the import of ONNX Runtime, which some benches compare with: it sends nothing.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
