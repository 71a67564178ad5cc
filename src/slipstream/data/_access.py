"""Access to data sets by name, and the list of available ones."""

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
def get(name: Literal["movielens_latest_small"], **options: Any) -> kinds.Ratings: ...
@overload
def get(name: Literal["frappe"], **options: Any) -> kinds.Clicks: ...
@overload
def get(name: Literal["fsdd"], **options: Any) -> kinds.Audio: ...
@overload
def get(name: Literal["gpu_traces"], **options: Any) -> kinds.Traces: ...
@overload
def get(name: Literal["cache_traces"], **options: Any) -> kinds.Accesses: ...
@overload
def get(name: Literal["profiles"], **options: Any) -> kinds.LayerProfile: ...
@overload
def get(name: Literal["mlperf_tiny", "detection", "mcu"], **options: Any) -> kinds.ModelFiles: ...
@overload
def get(name: str, **options: Any) -> kinds.Dataset: ...
def get(name: str, **options: Any) -> kinds.Dataset:
    """Load a data set by name.

    Args:
        name: name of the data set, as in `manifest`.
        options: options of the loader, for example ``split`` and ``limit`` for image sets,
            ``decode`` for JPEG sets, or ``trace`` for ``cache_traces``.

    Returns:
        An instance of the class that `manifest` lists as the kind of the set.

    Raises:
        UnknownNameError: there is no data set with this name.
        InvalidArgumentError: the set does not support an option, or its value is invalid.
        MissingDataError: the set is not on this machine; the error names what to install or set.
        MissingExtraError: decoding needs a package that is not installed.
        CorruptDataError: a file violates its format.
    """
    data_set = entry(name)
    load = _loader(data_set)
    accepted = list(inspect.signature(load).parameters)[1:]
    for option in options:
        if option not in accepted:
            raise InvalidArgumentError(
                option,
                f"not an option of '{name}'",
                remedy="supported: " + (", ".join(accepted) or "no options"),
            )
    return load(data_set, **options)


def available() -> list[str]:
    """Return the names of data sets on this machine, in the order of the catalogue.

    Only files are checked; a decoder that a set needs may still be missing.
    """
    return [listed.name for listed in manifest() if why_absent(listed.name) is None]


def why_absent(name: str) -> MissingDataError | MissingExtraError | None:
    """Return the error that `get` would raise; None if the set is on this machine.

    Raises:
        UnknownNameError: there is no data set with this name.
    """
    data_set = entry(name)
    if data_set.place == "standard library":
        return None
    if data_set.place == "scikit-learn":
        if importlib.util.find_spec("sklearn") is not None:
            return None
        return MissingExtraError(f"data set '{data_set.name}'", "scikit-learn", "data")
    try:
        _find.find(data_set)
    except MissingDataError as error:
        return error
    return None


def _loader(data_set: Entry) -> Callable[..., kinds.Dataset]:
    module, function = data_set.loader.split(":")
    load: Callable[..., kinds.Dataset] = getattr(
        importlib.import_module(f"slipstream.data.{module}"), function
    )
    return load
