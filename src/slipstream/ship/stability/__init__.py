"""Prediction stability: measure, explain and reduce disagreement between devices.

    from slipstream import runtimes, ship
    from slipstream.ship import stability

    matrix = stability.DeviceMatrix.default(pipeline)            # cameras, codecs, resizers
    found = stability.measure(runtimes.load("model.onnx"), scenes, matrix, labels)
    print(found.instability())                                   # share of scenes, 95 %
    stability.explain(model, scenes, matrix, labels)             # which stage
    stability.predict(model, scenes, matrix, labels)             # from a few scenes
    stability.harden(module, scenes, labels, pipeline)           # fine-tune, with a control

Submodules are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late
from slipstream.runtimes.paths import DeviceMatrix, DevicePath

if TYPE_CHECKING:
    from slipstream.ship.stability.explaining import Attribution, Cause, explain
    from slipstream.ship.stability.forecasting import Forecast, predict
    from slipstream.ship.stability.hardening import HardeningResult, harden
    from slipstream.ship.stability.measuring import Stability, measure
    from slipstream.ship.stability.scenes import Scenes, open_scenes, pipeline_for
    from slipstream.ship.stability.sheet import contact_sheet
    from slipstream.ship.stability.training import Recipe, TrainingFailedError, fine_tune
    from slipstream.ship.stability.twins import (
        Distortion,
        Gaussian,
        IdenticalTwins,
        Twins,
        TwoImages,
    )

_MODULES = {
    "explaining": ("Attribution", "Cause", "explain"),
    "forecasting": ("Forecast", "predict"),
    "hardening": ("HardeningResult", "harden"),
    "measuring": ("Stability", "measure"),
    "scenes": ("Scenes", "open_scenes", "pipeline_for"),
    "sheet": ("contact_sheet",),
    "training": ("Recipe", "TrainingFailedError", "fine_tune"),
    "twins": ("Distortion", "Gaussian", "IdenticalTwins", "Twins", "TwoImages"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Attribution",
    "Cause",
    "DeviceMatrix",
    "DevicePath",
    "Distortion",
    "Forecast",
    "Gaussian",
    "HardeningResult",
    "IdenticalTwins",
    "Recipe",
    "Scenes",
    "Stability",
    "TrainingFailedError",
    "Twins",
    "TwoImages",
    "contact_sheet",
    "explain",
    "fine_tune",
    "harden",
    "measure",
    "open_scenes",
    "pipeline_for",
    "predict",
]

__getattr__, __dir__ = late(__name__, _MODULE_OF, __all__)
