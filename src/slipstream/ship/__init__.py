"""From a trained model to where it runs.

- `slipstream.ship.export`: PyTorch to int8 and .tflite.
- `slipstream.ship.firmware`: C99 for microcontrollers, planned, predicted and verified.
- `slipstream.ship.stability`: whether a model agrees with itself on every device.
"""

from slipstream.ship.errors import (
    DoesNotFitError,
    ModelFileError,
    ToolchainError,
    UnsupportedModelError,
)

__all__ = ["DoesNotFitError", "ModelFileError", "ToolchainError", "UnsupportedModelError"]
