"""How a raw input becomes what a model takes: a value of named stages, and what can go wrong in it.

    from slipstream.runtimes import preprocessing as pre

    pipeline = pre.image_pipeline(224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    x = pipeline.batch([open("cat.jpg", "rb").read()])     # float32 [1, 3, 224, 224]
    for bug in pipeline.variations():                      # one stage done otherwise
        print(bug.text, bug.pipeline.hash)

A pipeline is data: `Pipeline.to_dict` is what a log holds, `Pipeline.from_dict` brings it back.
"""

from __future__ import annotations

from slipstream.runtimes.preprocessing.images import (
    Cast,
    Channels,
    Colour,
    Crop,
    Decode,
    Layout,
    Normalise,
    Orient,
    Resize,
    Scale,
    image_pipeline,
)
from slipstream.runtimes.preprocessing.pipeline import (
    Memo,
    Pipeline,
    RawInputError,
    Stage,
    Variation,
)

__all__ = [
    "Cast",
    "Channels",
    "Colour",
    "Crop",
    "Decode",
    "Layout",
    "Memo",
    "Normalise",
    "Orient",
    "Pipeline",
    "RawInputError",
    "Resize",
    "Scale",
    "Stage",
    "Variation",
    "image_pipeline",
]
