"""Loaders of data sets that are bundled with scikit-learn."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import numpy as np

from slipstream.data.catalogue import Entry
from slipstream.data.kinds import Images, Tabular
from slipstream.errors import MissingExtraError


def digits(entry: Entry) -> Images:
    """Load 1,797 handwritten digits: images uint8 [1797, 8, 8], labels 0 to 9.

    The original range of pixels, 0 to 16, is scaled to 0 to 255, as in other image sets.
    """
    bunch = _sklearn(entry).load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    return Images(
        entry.name, images, bunch.target.astype(np.int64), tuple(str(d) for d in range(10))
    )


def photograph(entry: Entry) -> Images:
    """Load one photograph: images uint8 [1, 427, 640, 3], label -1."""
    datasets = _sklearn(entry)
    if importlib.util.find_spec("PIL") is None:
        raise MissingExtraError(f"decoding '{entry.name}'", "Pillow", "vision")
    image = datasets.load_sample_image(f"{entry.name}.jpg")
    return Images(entry.name, np.array(image)[None], np.array([-1], dtype=np.int64), ())


def table(entry: Entry) -> Tabular:
    """Load a small table: features float64 [N, F], targets float64 [N]."""
    bunch = getattr(_sklearn(entry), f"load_{entry.name}")()
    return Tabular(
        entry.name,
        np.ascontiguousarray(bunch.data, dtype=np.float64),
        bunch.target.astype(np.float64),
        tuple(str(name) for name in bunch.feature_names),
        tuple(str(name) for name in getattr(bunch, "target_names", ())),
    )


def _sklearn(entry: Entry) -> ModuleType:
    try:
        return importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise MissingExtraError(f"data set '{entry.name}'", "scikit-learn", "data") from error
