"""From a name to its value: `get`, and what is here: `available`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, Literal, overload

from slipstream.data import _find, kinds
from slipstream.data.catalogue import Entry, entry, manifest
from slipstream.data.errors import MissingDataError
from slipstream.errors import InvalidArgumentError, MissingExtraError

_Text = Literal["python_topics", "stdlib_source", "tiny_shakespeare", "wikitext2"]
_Images = Literal["digits", "china", "flower", "fashion_mnist"]
_Tabular = Literal["breast_cancer", "wine", "iris", "diabetes"]
_Encodable = Literal["cifar10_jpeg", "imagenet_sample"]


@overload
def get(name: _Text, **options: Any) -> kinds.Text: ...
@overload
def get(name: _Images, **options: Any) -> kinds.Images: ...
@overload
def get(name: _Encodable, *, decode: Literal[False], **options: Any) -> kinds.EncodedImages: ...
@overload
def get(name: _Encodable, *, decode: Literal[True] = ..., **options: Any) -> kinds.Images: ...
@overload
def get(name: _Tabular, **options: Any) -> kinds.Tabular: ...
@overload
def get(name: Literal["multi30k"], **options: Any) -> kinds.Pairs: ...
@overload
def get(name: Literal["sst"], **options: Any) -> kinds.Trees: ...
@overload
def get(name: Literal["newsgroups"], **options: Any) -> kinds.Documents: ...
@overload
def get(
    name: Literal["movielens_latest_small", "movielens_100k"], **options: Any
) -> kinds.Ratings: ...
@overload
def get(name: Literal["gowalla"], **options: Any) -> kinds.Interactions: ...
@overload
def get(name: Literal["frappe", "criteo_sample"], **options: Any) -> kinds.Clicks: ...
@overload
def get(name: Literal["fsdd"], **options: Any) -> kinds.Audio: ...
@overload
def get(name: Literal["gpu_traces"], **options: Any) -> kinds.Traces: ...
@overload
def get(name: Literal["cache_traces"], **options: Any) -> kinds.Accesses: ...
@overload
def get(name: Literal["mlperf_v07"], **options: Any) -> kinds.TrainingTimes: ...
@overload
def get(name: Literal["profiles"], **options: Any) -> kinds.LayerProfile: ...
@overload
def get(name: Literal["mlperf_tiny", "detection", "mcu"], **options: Any) -> kinds.ModelFiles: ...
@overload
def get(name: str, **options: Any) -> kinds.Dataset: ...
def get(name: str, **options: Any) -> kinds.Dataset:
    """Load a data set by name.

    Args:
        name: as in `manifest`.
        options: those of the set's loader: ``split`` and ``limit`` for image sets, ``decode``
            and ``size`` for JPEG sets, ``trace`` for ``cache_traces``, and so on.

    Returns:
        A value of the class `manifest` gives as the set's kind.

    Raises:
        UnknownNameError: no such set; suggests the nearest.
        InvalidArgumentError: an option the set does not take, or a bad value.
        MissingDataError: known but not on this machine; says what to install or set.
        MissingExtraError: decoding needs a package that is not installed.
        CorruptDataError: a file does not hold what its format promises.
    """
    known = entry(name)
    load = _loader(known)
    accepted = list(inspect.signature(load).parameters)[1:]
    for option in options:
        if option not in accepted:
            raise InvalidArgumentError(
                option,
                f"not an option of '{name}'",
                remedy="it takes " + (", ".join(accepted) or "no options"),
            )
    return load(known, **options)


def available() -> list[str]:
    """Names of the sets that `get` would find now, in the catalogue's order.

    A set is listed by its files; whether a decoder it needs is installed is another question.
    """
    return [known.name for known in manifest() if why_absent(known.name) is None]


def why_absent(name: str) -> MissingDataError | MissingExtraError | None:
    """None where the files of a set are on this machine, else the error that `get` would raise.

    Raises:
        UnknownNameError: no such set.
    """
    known = entry(name)
    if known.place == "standard library":
        return None
    if known.place == "scikit-learn":
        if importlib.util.find_spec("sklearn") is not None:
            return None
        return MissingExtraError(f"data set '{known.name}'", "scikit-learn", "data")
    try:
        _find.find(known)
    except MissingDataError as error:
        return error
    return None


def _loader(known: Entry) -> Callable[..., kinds.Dataset]:
    module, function = known.loader.split(":")
    load: Callable[..., kinds.Dataset] = getattr(
        importlib.import_module(f"slipstream.data.{module}"), function
    )
    return load
