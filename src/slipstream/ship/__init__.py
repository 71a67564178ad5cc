"""Deploy trained models to devices.

- `slipstream.ship.export`: quantize PyTorch models to int8 and write .tflite.
- `slipstream.ship.firmware`: generate, predict and verify C99 for microcontrollers.
- `slipstream.ship.stability`: measure whether a model's answers agree between devices.
"""

from slipstream.ship.errors import (
    DoesNotFitError,
    ModelFileError,
    ToolchainError,
    UnsupportedModelError,
)

__all__ = ["DoesNotFitError", "ModelFileError", "ToolchainError", "UnsupportedModelError"]
