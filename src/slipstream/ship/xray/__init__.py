"""Find out why a deployed model is worse or slower than the trained one.

from slipstream import xray

with xray.record("edge.xr") as rec:                     # in the app
    for image in frames:
        (scores,) = rec.run(session, preprocess(image), raw=image)

xray.replay("edge.xr", "model.onnx", "ref.xr", preprocessing=pipeline)
found = xray.compare("ref.xr", "edge.xr")
print(found.cause.text, found.fix)                      # "channels in the order BGR", a snippet
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.ship.xray.assertions import Failure, LayerView, assertion
    from slipstream.ship.xray.bisecting import BisectionResult, LayerError, bisect, layer_errors
    from slipstream.ship.xray.comparing import Comparison, LayerDrift, compare
    from slipstream.ship.xray.explaining import Cause, explain
    from slipstream.ship.xray.log import Log, LogError
    from slipstream.ship.xray.recording import Recorder, record
    from slipstream.ship.xray.replaying import replay
    from slipstream.ship.xray.statistics import header
    from slipstream.ship.xray.timing import Latency, latency

_MODULES = {
    "assertions": ("Failure", "LayerView", "assertion"),
    "bisecting": ("BisectionResult", "LayerError", "bisect", "layer_errors"),
    "comparing": ("Comparison", "LayerDrift", "compare"),
    "explaining": ("Cause", "explain"),
    "log": ("Log", "LogError"),
    "recording": ("Recorder", "record"),
    "replaying": ("replay",),
    "statistics": ("header",),
    "timing": ("Latency", "latency"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "BisectionResult",
    "Cause",
    "Comparison",
    "Failure",
    "Latency",
    "LayerDrift",
    "LayerError",
    "LayerView",
    "Log",
    "LogError",
    "Recorder",
    "assertion",
    "bisect",
    "compare",
    "explain",
    "header",
    "latency",
    "layer_errors",
    "record",
    "replay",
]

__getattr__, __dir__ = late(__name__, _MODULE_OF, __all__)
