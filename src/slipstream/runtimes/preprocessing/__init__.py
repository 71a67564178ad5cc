"""Preprocessing pipelines of named stages, from raw inputs to a model's, and their usual bugs.

    from slipstream.runtimes import preprocessing as pre

    pipeline = pre.image_pipeline(224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    x = pipeline.batch([open("cat.jpg", "rb").read()])     # float32 [1, 3, 224, 224]
    for bug in pipeline.variations():                      # one stage changed
        print(bug.text, bug.pipeline.hash)

`sound_pipeline` and `text_pipeline` do the same for recordings and text. Pipelines are values that
`Pipeline.to_dict` and `Pipeline.from_dict` convert to and from JSON."""

from __future__ import annotations

from slipstream.runtimes.preprocessing.cast import Cast
from slipstream.runtimes.preprocessing.images import (
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
from slipstream.runtimes.preprocessing.sound import Length, Signal, Waveform, sound_pipeline
from slipstream.runtimes.preprocessing.spectrum import (
    Arrange,
    Bands,
    Cepstrum,
    Log,
    Spectrum,
    Standardise,
    triangles,
)
from slipstream.runtimes.preprocessing.text import (
    Casing,
    Read,
    Sequence,
    Split,
    Vocabulary,
    text_pipeline,
    vocabulary_of,
)

__all__ = [
    "Arrange",
    "Bands",
    "Casing",
    "Cast",
    "Cepstrum",
    "Channels",
    "Colour",
    "Crop",
    "Decode",
    "Layout",
    "Length",
    "Log",
    "Memo",
    "Normalise",
    "Orient",
    "Pipeline",
    "RawInputError",
    "Read",
    "Resize",
    "Scale",
    "Sequence",
    "Signal",
    "Spectrum",
    "Split",
    "Stage",
    "Standardise",
    "Variation",
    "Vocabulary",
    "Waveform",
    "image_pipeline",
    "sound_pipeline",
    "text_pipeline",
    "triangles",
    "vocabulary_of",
]
