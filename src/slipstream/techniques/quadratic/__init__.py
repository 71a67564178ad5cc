"""Layers of quadratic neurons that save no more for the backward pass than first-order layers.

Names are imported on first use, so that the technique predicts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.techniques.quadratic.builder import (
        Sensitivity,
        ShorteningResult,
        sensitivities,
        shorten,
    )
    from slipstream.techniques.quadratic.neurons import NEURONS, Neuron
    from slipstream.techniques.quadratic.nn import (
        Conv2d,
        FusedQuadratic,
        Linear,
        convert,
        convert_layer,
        fuse,
    )

_HOMES = {
    "builder": ("Sensitivity", "ShorteningResult", "sensitivities", "shorten"),
    "neurons": ("NEURONS", "Neuron"),
    "nn": ("Conv2d", "FusedQuadratic", "Linear", "convert", "convert_layer", "fuse"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "NEURONS", "Conv2d", "FusedQuadratic", "Linear", "Neuron", "Sensitivity", "ShorteningResult",
    "convert", "convert_layer", "fuse", "sensitivities", "shorten",
]  # fmt: skip

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
